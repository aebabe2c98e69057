"""Sampling parameters that contradict each other."""

from collections.abc import Iterator

from pagedserve.errors import RequestError
from pagedserve.sampling_params.options import PARAMETERS, SamplingOptions


def contradictions(params: SamplingOptions) -> Iterator[RequestError]:
    """Errors for parameters that contradict each other."""
    if params.max_num_running_seqs < params.n:
        yield RequestError(
            f"best_of is {params.best_of}; it must be at least n, {params.n}", param="best_of"
        )
    most = params.max_tokens
    if most is not None and params.min_tokens > most:
        yield RequestError(
            f"min_tokens is {params.min_tokens}; it must be from 0 to max_tokens, {most}",
            param="min_tokens",
        )
    if params.stop and not params.detokenize:
        yield RequestError(
            f"stop is {list(params.stop)} with detokenize=False; stop strings are found in the "
            "text: leave detokenize True or give stop_token_ids",
            param="stop",
        )
    if params.max_num_running_seqs > 1 and params.is_greedy:
        yield RequestError(
            f"{_named_width(params)} with greedy sampling (temperature={params.temperature}, "
            f"top_k={params.top_k}): all would be equal; give 1, sample at random or give "
            "use_beam_search=True",
            param=_width_name(params),
        )
    yield from _against_beams(params) if params.use_beam_search else _for_beams_only(params)


def _width_name(params: SamplingOptions) -> str:
    return "n" if params.best_of is None else "best_of"


def _named_width(params: SamplingOptions) -> str:
    return f"{_width_name(params)} is {params.max_num_running_seqs}"


def _against_beams(params: SamplingOptions) -> Iterator[RequestError]:
    if params.max_num_running_seqs == 1:
        yield RequestError(
            f"{_named_width(params)} with use_beam_search; best_of, or n without it, is the width "
            "and must be at least 2",
            param=_width_name(params),
        )
    for name, known in PARAMETERS.items():
        value = getattr(params, name)
        if known.off and value not in known.off:
            yield RequestError(
                f"{name} is {value} with use_beam_search; beam search chooses by "
                f"log-probability; give {name}={known.off[0]}",
                param=name,
            )


def _for_beams_only(params: SamplingOptions) -> Iterator[RequestError]:
    for name, neutral in {"early_stopping": False, "length_penalty": 1.0}.items():
        value = getattr(params, name)
        if value != neutral:
            yield RequestError(
                f"{name} is {value!r} without use_beam_search; it is for beams alone: leave it out "
                "or give use_beam_search=True",
                param=name,
            )

"""Sampling options: those of every command that generates, and those of ``generate`` only.

None is an option that was not given; its default is that of ``generate`` or of the server.
"""

import argparse
from collections.abc import Iterator
from typing import Any, Final

from pagedserve.errors import RequestError
from pagedserve.sampling_params import SamplingParams
from pagedserve.sampling_params.options import PARAMETERS

# Name, type, help, and the default of ``generate``.
_COMMON: Final = (
    ("max-tokens", int, "maximum number of new tokens", "128"),
    (
        "temperature",
        float,
        "randomness of sampling; 0 is greedy",
        "0; 1 with top-p, top-k, min-p or several outputs",
    ),
    ("top-p", float, "cumulative probability of the sampled tokens, above 0, at most 1", "1.0"),
    ("top-k", int, "number of most likely tokens to sample from; -1 is all", "-1"),
    ("min-p", float, "minimum probability relative to the most likely token, 0 to 1", "0.0"),
    ("presence-penalty", float, "penalty on tokens that have occurred, -2 to 2", "0.0"),
    ("frequency-penalty", float, "penalty per occurrence of a token, -2 to 2", "0.0"),
    (
        "repetition-penalty",
        float,
        "above 1 discourages repetition, below 1 encourages it",
        "1.0",
    ),
)
_OFFLINE: Final = (
    ("n", int, "number of outputs per prompt", "1"),
    ("best-of", int, "number of sampled sequences; the most likely --n are returned", "--n"),
    ("beam-width", int, "number of beams of a search; the best --n are returned", None),
    ("length-penalty", float, "exponent of the length that a beam's score is divided by", "1.0"),
    ("logprobs", int, "number of most likely tokens to print for each position", None),
)
_MAX_TOKENS: Final = 128


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """Add the options that are fields of requests to a server."""
    for name, kind, text, _ in _COMMON:
        group.add_argument(f"--{name}", type=kind, help=text)
    group.add_argument("--seed", type=int, help="seed of the random numbers")
    _add_stop(group)


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request for the options of ``add_sampling``."""
    names = [name.replace("-", "_") for name, *_ in _COMMON] + ["seed", "stop"]
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def add_generation(group: argparse._ArgumentGroup) -> None:
    """Add the options of ``generate``."""
    for name, kind, text, default in (*_COMMON, *_OFFLINE):
        shown = text if default is None else f"{text} ({default})"
        group.add_argument(f"--{name}", type=kind, help=shown)
    _add_stop(group)


def _add_stop(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--stop", action="append", help="stop string; may be repeated")


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The sampling parameters for the options of ``add_generation``.

    Raises:
        RequestError: Options that contradict each other, or a value out of range.
    """
    for reason in _contradictions(options):
        raise RequestError(reason)
    same_names = (
        "top_p top_k min_p n length_penalty presence_penalty frequency_penalty "
        "repetition_penalty logprobs stop"
    )
    has_beams = options.beam_width is not None
    temperature = options.temperature
    if temperature is None:
        temperature = 1.0 if _asks_to_draw(options) and not has_beams else 0.0
    return SamplingParams.from_optional(
        **{name: getattr(options, name) for name in same_names.split()},
        max_tokens=_MAX_TOKENS if options.max_tokens is None else options.max_tokens,
        best_of=options.beam_width if has_beams else options.best_of,
        use_beam_search=has_beams,
        temperature=temperature,
    )


def _num_sampled(options: argparse.Namespace) -> int:
    return max(options.n or 1, options.best_of or 1)


def _asks_to_draw(options: argparse.Namespace) -> bool:
    drawn = any(_is_drawn(options, name) for name in ("top_p", "top_k", "min_p"))
    return drawn or _num_sampled(options) > 1


def _is_drawn(options: argparse.Namespace, name: str) -> bool:
    return getattr(options, name) not in (None, *PARAMETERS[name].off)


def _contradictions(options: argparse.Namespace) -> Iterator[str]:
    """Why options contradict each other, by their own names."""
    width, n = options.beam_width, options.n or 1
    if width is None:
        if _num_sampled(options) > 1 and (options.temperature == 0 or options.top_k == 1):
            yield (
                "several outputs are requested, and with --temperature 0 or --top-k 1 they would "
                "all be equal: give other values, or --beam-width"
            )
        if options.length_penalty not in (None, 1):
            yield "--length-penalty is given without --beam-width; it applies to beams alone"
        return
    if options.best_of is not None:
        yield "--beam-width and --best-of are both given; give one of them"
    if width < max(2, n):
        yield f"--beam-width is {width}; it must be at least 2 and at least --n, {n}"
    for name in [name for name, known in PARAMETERS.items() if known.off]:
        if _is_drawn(options, name):
            option = f"--{name.replace('_', '-')}"
            yield f"{option} and --beam-width are both given; beam search does not sample: give one"

"""Checks of single sampling parameters and of their combinations."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pagedserve.checks as checks
from pagedserve.errors import RequestError
from pagedserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from pagedserve.sampling_params import EarlyStopping, SamplingParams

# Values that disable sampling or its filters.
UNDRAWN: Final = {"temperature": (0,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}

# A lower temperature only makes logits overflow; the most likely token has all the mass.
_GREEDY_BELOW: Final = 1e-5

# Larger factors and summands, or factors below the inverse, could overflow float32.
_LARGE: Final = 1e30


def _temperature(name: str, value: object) -> float:
    number = checks.real("a finite number, at least 0", low=0)(name, value)
    return number if number >= _GREEDY_BELOW else 0.0


def _seed(name: str, value: object) -> int | None:
    """Check a seed; -1 means no seed, as in vLLM."""
    seed = checks.optional(checks.integer("at least 0, or -1 or None for none", low=-1))(
        name, value
    )
    return None if seed == -1 else seed


def _truncate_prompt_tokens(name: str, value: object) -> int | None:
    accepted = "at least 1, -1 for as many as the model takes, or None"
    number = checks.optional(checks.integer(accepted, low=-1))(name, value)
    if number == 0:
        checks.refuse(name, value, f"an integer, {accepted}")
    return number


def _early_stopping(name: str, value: object) -> "EarlyStopping":
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value != "never":
        checks.refuse(name, value, 'True, False or "never"')
    return "never"


def _stop(name: str, value: object) -> tuple[str, ...]:
    strings = checks.each(checks.text, "a string or a list of strings")
    return strings(name, [value] if isinstance(value, str) else value)


def _allowed_token_ids(name: str, value: object) -> tuple[int, ...] | None:
    accepted = "None or a list of token ids, at least one"
    token_ids = checks.each(_TOKEN_ID, accepted)(name, value)
    if value is not None and not token_ids:
        checks.refuse(name, value, accepted)
    return token_ids or None


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Check biases; accepts pairs too, which ``dataclasses.replace`` passes."""
    try:
        biases = {} if value is None else dict(value)
    except (TypeError, ValueError):
        checks.refuse(name, value, "a mapping of token ids to numbers")
    token_id = checks.integer("at least 0; a string of digits is no token id", low=0)
    bias = checks.real("a number from -1e30 to 1e30", low=-_LARGE, high=_LARGE)
    return tuple(
        sorted(
            (token_id(f"a key of {name}", token), bias(f"{name}[{token!r}]", number))
            for token, number in biases.items()
        )
    )


def _structured_outputs(name: str, value: object) -> StructuredOutputsParams | None:
    del name  # the parameters know it
    return None if value is None else StructuredOutputsParams.of(value)


_TOKEN_ID: Final = checks.integer("at least 0", low=0)
_PENALTY: Final = checks.real("from -2 to 2", low=-2, high=2)
_NUM_LOGPROBS: Final = checks.optional(
    checks.integer("at least 0, -1 for the whole vocabulary, or None", low=-1)
)

CHECKS: Final[dict[str, checks.Check[object]]] = {
    "n": checks.integer("at least 1", low=1),
    "best_of": checks.optional(checks.integer("at least 1, or None for n", low=1)),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": checks.real("a number from 1e-30 to 1e30", low=1 / _LARGE, high=_LARGE),
    "temperature": _temperature,
    "top_p": checks.real("above 0 and at most 1", low=0, high=1, open_low=True),
    "top_k": checks.integer("at least 1, or -1 or 0 for all tokens", low=-1),
    "min_p": checks.real("from 0 to 1", low=0, high=1),
    "seed": _seed,
    "use_beam_search": checks.flag,
    "length_penalty": checks.real("from -10 to 10", low=-10, high=10),
    "early_stopping": _early_stopping,
    "stop": _stop,
    "stop_token_ids": checks.each(_TOKEN_ID, "a list of token ids"),
    "bad_words": checks.each(checks.text, "a list of strings"),
    "include_stop_str_in_output": checks.flag,
    "ignore_eos": checks.flag,
    "max_tokens": checks.optional(checks.integer("at least 1, or None for no limit", low=1)),
    "min_tokens": checks.integer("from 0 to max_tokens", low=0),
    "logprobs": _NUM_LOGPROBS,
    "prompt_logprobs": _NUM_LOGPROBS,
    "detokenize": checks.flag,
    "skip_special_tokens": checks.flag,
    "spaces_between_special_tokens": checks.flag,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "logits_processors": checks.each(checks.function, "a list of callables"),
    "truncate_prompt_tokens": _truncate_prompt_tokens,
    "structured_outputs": _structured_outputs,
}


def contradictions(params: "SamplingParams") -> Iterator[RequestError]:
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


def _width_name(params: "SamplingParams") -> str:
    return "n" if params.best_of is None else "best_of"


def _named_width(params: "SamplingParams") -> str:
    return f"{_width_name(params)} is {params.max_num_running_seqs}"


def _against_beams(params: "SamplingParams") -> Iterator[RequestError]:
    if params.max_num_running_seqs == 1:
        yield RequestError(
            f"{_named_width(params)} with use_beam_search; best_of, or n without it, is the width "
            "and must be at least 2",
            param=_width_name(params),
        )
    for name, neutral in UNDRAWN.items():
        value = getattr(params, name)
        if value not in neutral:
            yield RequestError(
                f"{name} is {value} with use_beam_search; beam search chooses by "
                f"log-probability; give {name}={neutral[0]}",
                param=name,
            )


def _for_beams_only(params: "SamplingParams") -> Iterator[RequestError]:
    for name, neutral in {"early_stopping": False, "length_penalty": 1.0}.items():
        value = getattr(params, name)
        if value != neutral:
            yield RequestError(
                f"{name} is {value!r} without use_beam_search; it is for beams alone: leave it out "
                "or give use_beam_search=True",
                param=name,
            )

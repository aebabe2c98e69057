"""Checks of single sampling parameters, where those of ``pagedserve.checks`` do not suffice."""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import pagedserve.checks as checks
from pagedserve.errors import RequestError
from pagedserve.sampling_params.output_kind import RequestOutputKind
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams

EarlyStopping: TypeAlias = bool | Literal["never"]

# A lower temperature only makes logits overflow; the most likely token has all the mass.
_GREEDY_BELOW: Final = 1e-5

# Larger factors and summands, or factors below the inverse, could overflow float32.
_LARGE: Final = 1e30

# Largest number of tokens or sequences.
_MAX_COUNT: Final = 2**31 - 1

# Token ids as JSON keys; no id has more digits.
_DIGITS: Final = re.compile("[0-9]{1,18}")

TOKEN_ID: Final = checks.integer("at least 0", low=0)
PENALTY: Final = checks.real("from -2 to 2", low=-2, high=2)
FACTOR: Final = checks.real("a number from 1e-30 to 1e30", low=1 / _LARGE, high=_LARGE)
_NUM_LOGPROBS: Final = checks.optional(
    checks.integer("at least 0, -1 for the whole vocabulary, or None", low=-1)
)


def count(low: int, otherwise: str = "") -> checks.Check[int]:
    """A number of tokens or sequences, at least ``low``; the error adds ``otherwise``."""
    return checks.integer(f"from {low} to {_MAX_COUNT}{otherwise}", low=low, high=_MAX_COUNT)


def num_logprobs(name: str, value: object) -> int | None:
    """A number of most likely tokens, -1 for the whole vocabulary, or None; True is 1."""
    return _NUM_LOGPROBS(name, 1 if value is True else value)


def temperature(name: str, value: object) -> float:
    """A finite number, at least 0; one that is too small becomes 0."""
    number = checks.real("a finite number, at least 0", low=0)(name, value)
    return number if number >= _GREEDY_BELOW else 0.0


def minus_one_is_none(name: str, value: object) -> int | None:
    """An integer of at least 0, as a seed; -1 is None, as in vLLM."""
    number = checks.optional(checks.integer("at least 0, or -1 or None for none", low=-1))(
        name, value
    )
    return None if number == -1 else number


def truncate_prompt_tokens(name: str, value: object) -> int | None:
    """A number of tokens, -1 for as many as the model takes, or None."""
    accepted = "at least 1, -1 for as many as the model takes, or None"
    number = checks.optional(checks.integer(accepted, low=-1))(name, value)
    if number == 0:
        checks.refuse(name, value, f"an integer, {accepted}")
    return number


def early_stopping(name: str, value: object) -> EarlyStopping:
    """True, False or "never"."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value != "never":
        checks.refuse(name, value, 'True, False or "never"')
    return "never"


def stop(name: str, value: object) -> tuple[str, ...]:
    """One string or several."""
    strings = checks.each(checks.text, "a string or a list of strings")
    return strings(name, [value] if isinstance(value, str) else value)


def allowed_token_ids(name: str, value: object) -> tuple[int, ...] | None:
    """None, or at least one token id."""
    accepted = "None or a list of token ids, at least one"
    token_ids = checks.each(TOKEN_ID, accepted)(name, value)
    if value is not None and not token_ids:
        checks.refuse(name, value, accepted)
    return token_ids or None


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Biases by token id; pairs too, which ``dataclasses.replace`` passes."""
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


def biases_of_json(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Convert keys of ``logit_bias`` that are strings of digits, as in JSON, to token ids."""
    return {_token_id(token): bias for token, bias in dict(value).items()}


def _token_id(key: object) -> object:
    if not isinstance(key, str):
        return key
    if _DIGITS.fullmatch(key) is None:
        raise RequestError(
            f"logit_bias has the key {key!r}; keys must be token ids in digits", param="logit_bias"
        )
    return int(key)


def structured_outputs(name: str, value: object) -> StructuredOutputsParams | None:
    """None, parameters, or a mapping of their names."""
    del name  # the parameters know it
    return None if value is None else StructuredOutputsParams.of(value)


def output_kind(name: str, value: object) -> RequestOutputKind:
    """A member of the enum."""
    if not isinstance(value, RequestOutputKind):
        checks.refuse(name, value, "a RequestOutputKind: CUMULATIVE, DELTA or FINAL_ONLY")
    return value

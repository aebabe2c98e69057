"""How the tokens of one request are chosen and when it ends."""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, SupportsFloat, SupportsIndex

from pagedserve.errors import RequestError

# Parameters of the field that this engine does not have yet, each with the value that asks for
# nothing.  Only that value is accepted: a parameter that is taken and ignored is a lie.
_LATER: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "best_of": (None, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": (None, [], ()),
    "bad_words": (None, [], ()),
    "include_stop_str_in_output": (False,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "logits_processors": (None,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "truncate_prompt_tokens": (None,),
    "guided_decoding": (None,),
    "structured_outputs": (None,),
    "output_kind": (),
    "extra_args": (None,),
}


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """The sampling parameters of one request; checked when made, never changed after.

    Attributes:
        temperature: 0 is greedy; otherwise the logits are divided by it.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: Keep the k likeliest tokens; -1 or 0 keeps all.
        min_p: Keep tokens at least this share as likely as the likeliest, in [0, 1].
        seed: Makes the request's random numbers its own: the same tokens alone or among others.
            None derives them from the engine's seed and the request's ordinal.
        max_tokens: At most this many new tokens, at least 1.  The engine's ``max_model_len``
            may end the request earlier.
        min_tokens: No end-of-sequence or stop token before this many new tokens.
        ignore_eos: Go on past the model's end-of-sequence token.
        stop_token_ids: Further tokens that end the request; the token is part of ``token_ids``.

    Raises:
        RequestError: A value out of range (the message says what is accepted), or a parameter
            that does not exist or is not supported yet, by its name.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]

    def __init__(
        self,
        *,
        temperature: SupportsFloat = 1.0,
        top_p: SupportsFloat = 1.0,
        top_k: SupportsIndex = -1,
        min_p: SupportsFloat = 0.0,
        seed: SupportsIndex | None = None,
        max_tokens: SupportsIndex = 16,
        min_tokens: SupportsIndex = 0,
        ignore_eos: bool = False,
        stop_token_ids: Iterable[SupportsIndex] | None = (),
        **later: object,
    ) -> None:
        for name, value in later.items():
            _refuse_unless_neutral(name, value)
        most = _integer("max_tokens", max_tokens, "at least 1", low=1)
        fields: dict[str, object] = {
            "temperature": _real("temperature", temperature, "a finite number, at least 0"),
            "top_p": _real("top_p", top_p, "above 0 and at most 1", high=1.0, open_low=True),
            "top_k": _integer("top_k", top_k, "at least 1, or -1 or 0 for all tokens", low=-1),
            "min_p": _real("min_p", min_p, "from 0 to 1", high=1.0),
            "seed": None if seed is None else _integer("seed", seed, "None or at least 0", low=0),
            "max_tokens": most,
            "min_tokens": _integer(
                "min_tokens", min_tokens, f"from 0 to max_tokens, {most}", low=0, high=most
            ),
            "ignore_eos": _flag("ignore_eos", ignore_eos),
            "stop_token_ids": _token_ids(stop_token_ids),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def _refuse_unless_neutral(name: str, value: object) -> None:
    if name not in _LATER:
        accepted = ", ".join(SamplingParams.__slots__)
        raise RequestError(f"unknown sampling parameter: {name}={value!r}; accepted: {accepted}")
    if not any(value == neutral for neutral in _LATER[name]):
        neutral = " or ".join(repr(one) for one in _LATER[name][:1])
        hint = f"; leave it out or give {neutral}" if neutral else "; leave it out"
        raise RequestError(f"not supported yet: {name}={value!r}{hint}")


def _real(
    name: str,
    value: object,
    accepted: str,
    *,
    high: float = math.inf,
    open_low: bool = False,
) -> float:
    """A finite number from 0 (or above it) to ``high``."""
    number = math.nan
    if isinstance(value, SupportsFloat) and not isinstance(value, bool):
        number = float(value)
    if not (math.isfinite(number) and 0 <= number <= high) or (open_low and number == 0):
        raise RequestError(f"{name} is {value!r}; it must be {accepted}")
    return number


def _integer(name: str, value: object, accepted: str, *, low: int, high: int | None = None) -> int:
    number = None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = operator.index(value)
    if number is None or number < low or (high is not None and number > high):
        raise RequestError(f"{name} is {value!r}; it must be an integer, {accepted}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; it must be True or False")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RequestError(f"stop_token_ids is {value!r}; it must be a list of token ids")
    return tuple(
        _integer(f"stop_token_ids[{index}]", token, "at least 0", low=0)
        for index, token in enumerate(value)
    )

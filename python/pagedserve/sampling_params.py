"""How the tokens of one request are chosen, what its text shows, and when it ends."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsFloat, SupportsIndex, TypeAlias

from pagedserve import checks
from pagedserve.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor: TypeAlias = "Callable[[list[int], Tensor], Tensor]"
EarlyStopping: TypeAlias = bool | Literal["never"]

# Below this a temperature only makes logits overflow; the likeliest token has all the mass.
_GREEDY_BELOW: Final = 1e-5

# Values with which nothing is drawn at random, or nothing is left out of what is drawn.
UNDRAWN: Final = {"temperature": (0,), "top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}

# Larger factors and summands, or factors below the inverse, could leave float32.
_LARGE: Final = 1e30

# Parameters of the field that this engine does not have yet; None asks for nothing.  Any other
# value is refused: a parameter that is taken and ignored is a lie.
_LATER: Final = ("guided_decoding", "structured_outputs", "output_kind", "extra_args")


@dataclass(frozen=True, slots=True, init=False)
class SamplingParams:
    """The sampling parameters of one request; checked when made, never changed after.

    Attributes:
        n: Outputs to return, at least 1.
        best_of: Sequences to sample, of which the ``n`` likeliest are returned; the width of a
            beam search.  At least ``n``; None is ``n``.
        presence_penalty: Subtracted from the logit of each token the output has, from -2 to 2.
        frequency_penalty: The same times how often the output has it, from -2 to 2.
        repetition_penalty: Divides the logit of a token that prompt or output has, multiplies it
            where it is negative; from 1e-30 to 1e30.
        temperature: 0 is greedy; otherwise the logits are divided by it.  Below 0.00001 it
            becomes 0.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: Keep the k likeliest tokens; -1 or 0 keeps all.
        min_p: Keep tokens at least this share as likely as the likeliest, in [0, 1].
        seed: Makes the request's random numbers its own: the same tokens alone or among others.
            None derives them from the engine's seed and the request's ordinal.
        use_beam_search: Search for the ``n`` likeliest outputs with ``best_of`` beams, at least
            2; asks for temperature 0 and no top_p, top_k or min_p.
        length_penalty: A beam's log-probability is divided by its length to this power, from
            -10 to 10.
        early_stopping: When a beam search ends, once ``best_of`` beams have: True at once, False
            where a better one is unlikely, "never" only where a better one is impossible.
        stop: Strings that end the request; given as one or a list.
        stop_token_ids: Further tokens that end the request; the token is part of ``token_ids``.
            Its text is left out, as that of the end-of-sequence token is.
        bad_words: Words that must not come, as the tokenizer writes them.
        include_stop_str_in_output: Whether the text holds the stop string or token that ended it.
        ignore_eos: Go on past the model's end-of-sequence token.
        max_tokens: At most this many new tokens, at least 1.  The engine's ``max_model_len``
            may end the request earlier.
        min_tokens: No end-of-sequence or stop token before this many new tokens.
        logprobs: Return so many likeliest tokens with each new one's log-probability, or None.
        prompt_logprobs: The same for each token of the prompt.
        detokenize: Make text; without it ``stop`` cannot be found.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Taken for the field's sake: the tokenizers of transformers
            5 put no spaces there, whatever it says.
        logit_bias: What to add to the logits of which tokens: given as a mapping of token id to
            number from -1e30 to 1e30, held as pairs in the order of the ids.
        allowed_token_ids: The only tokens that may come, at least one; None allows all.
        logits_processors: Called in turn with the output token ids and the logits, ``[V]``; each
            returns the logits to go on with.
        truncate_prompt_tokens: Keep so many of the prompt's last tokens, at least 1, or None.

    Raises:
        RequestError: A value out of range (the message says what is accepted), two parameters
            that contradict each other, or one that does not exist or is not supported yet, by
            its name.
    """

    n: int
    best_of: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    use_beam_search: bool
    length_penalty: float
    early_stopping: EarlyStopping
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    include_stop_str_in_output: bool
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    logits_processors: tuple[LogitsProcessor, ...]
    truncate_prompt_tokens: int | None

    def __init__(
        self,
        *,
        n: SupportsIndex = 1,
        best_of: SupportsIndex | None = None,
        presence_penalty: SupportsFloat = 0.0,
        frequency_penalty: SupportsFloat = 0.0,
        repetition_penalty: SupportsFloat = 1.0,
        temperature: SupportsFloat = 1.0,
        top_p: SupportsFloat = 1.0,
        top_k: SupportsIndex = -1,
        min_p: SupportsFloat = 0.0,
        seed: SupportsIndex | None = None,
        use_beam_search: bool = False,
        length_penalty: SupportsFloat = 1.0,
        early_stopping: EarlyStopping = False,
        stop: str | Iterable[str] | None = None,
        stop_token_ids: Iterable[SupportsIndex] | None = None,
        bad_words: Iterable[str] | None = None,
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        max_tokens: SupportsIndex = 16,
        min_tokens: SupportsIndex = 0,
        logprobs: SupportsIndex | None = None,
        prompt_logprobs: SupportsIndex | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        logit_bias: Mapping[int, SupportsFloat] | Iterable[tuple[int, float]] | None = None,
        allowed_token_ids: Iterable[SupportsIndex] | None = None,
        logits_processors: Iterable[LogitsProcessor] | None = None,
        truncate_prompt_tokens: SupportsIndex | None = None,
        **later: object,
    ) -> None:
        # All arguments by name: _CHECKS has one entry for each.
        given = locals()
        _refuse_unless_neutral(later)
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, given[name]))
        _refuse_contradictions(self)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one, so that nothing is drawn at random."""
        return not self.use_beam_search and (self.temperature == 0 or self.top_k == 1)

    @property
    def max_num_running_seqs(self) -> int:
        """Sequences of the request that run at once, at most: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of


def _temperature(name: str, value: object) -> float:
    number = checks.real("a finite number, at least 0", low=0)(name, value)
    return number if number >= _GREEDY_BELOW else 0.0


def _early_stopping(name: str, value: object) -> EarlyStopping:
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
    """Pairs are taken as well: ``dataclasses.replace`` gives back what is held."""
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


_TOKEN_ID: Final = checks.integer("at least 0", low=0)
_PENALTY: Final = checks.real("from -2 to 2", low=-2, high=2)
_NUM_LOGPROBS: Final = checks.optional(checks.integer("at least 0, or None", low=0))

_CHECKS: Final[dict[str, checks.Check[object]]] = {
    "n": checks.integer("at least 1", low=1),
    "best_of": checks.optional(checks.integer("at least 1, or None for n", low=1)),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": checks.real("a number from 1e-30 to 1e30", low=1 / _LARGE, high=_LARGE),
    "temperature": _temperature,
    "top_p": checks.real("above 0 and at most 1", low=0, high=1, open_low=True),
    "top_k": checks.integer("at least 1, or -1 or 0 for all tokens", low=-1),
    "min_p": checks.real("from 0 to 1", low=0, high=1),
    "seed": checks.optional(checks.integer("at least 0, or None", low=0)),
    "use_beam_search": checks.flag,
    "length_penalty": checks.real("from -10 to 10", low=-10, high=10),
    "early_stopping": _early_stopping,
    "stop": _stop,
    "stop_token_ids": checks.each(_TOKEN_ID, "a list of token ids"),
    "bad_words": checks.each(checks.text, "a list of strings"),
    "include_stop_str_in_output": checks.flag,
    "ignore_eos": checks.flag,
    "max_tokens": checks.integer("at least 1", low=1),
    "min_tokens": checks.integer("from 0 to max_tokens", low=0),
    "logprobs": _NUM_LOGPROBS,
    "prompt_logprobs": _NUM_LOGPROBS,
    "detokenize": checks.flag,
    "skip_special_tokens": checks.flag,
    "spaces_between_special_tokens": checks.flag,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "logits_processors": checks.each(checks.function, "a list of callables"),
    "truncate_prompt_tokens": checks.optional(checks.integer("at least 1, or None", low=1)),
}


def _refuse_unless_neutral(later: dict[str, object]) -> None:
    for name, value in later.items():
        if name not in _LATER:
            accepted = ", ".join(_CHECKS)
            raise RequestError(
                f"unknown sampling parameter: {name}={value!r}; accepted: {accepted}"
            )
        if value is not None:
            raise RequestError(f"not supported yet: {name}={value!r}; leave it out")


def _refuse_contradictions(params: SamplingParams) -> None:
    reason = next(_contradictions(params), None)
    if reason is not None:
        raise RequestError(reason)


def _contradictions(params: SamplingParams) -> Iterator[str]:
    """What is wrong between parameters each of which is fine alone."""
    if params.max_num_running_seqs < params.n:
        yield f"best_of is {params.best_of}; it must be at least n, {params.n}"
    if params.min_tokens > params.max_tokens:
        most = params.max_tokens
        yield f"min_tokens is {params.min_tokens}; it must be from 0 to max_tokens, {most}"
    if params.stop and not params.detokenize:
        yield (
            f"stop is {list(params.stop)} with detokenize=False; stop strings are found in the "
            "text: leave detokenize True or give stop_token_ids"
        )
    if params.max_num_running_seqs > 1 and params.is_greedy:
        yield (
            f"{_named_width(params)} with greedy sampling (temperature={params.temperature}, "
            f"top_k={params.top_k}): all would be equal; give 1, sample at random or give "
            "use_beam_search=True"
        )
    yield from _against_beams(params) if params.use_beam_search else _for_beams_only(params)


def _named_width(params: SamplingParams) -> str:
    return f"n is {params.n}" if params.best_of is None else f"best_of is {params.best_of}"


def _against_beams(params: SamplingParams) -> Iterator[str]:
    if params.max_num_running_seqs == 1:
        yield (
            f"{_named_width(params)} with use_beam_search; best_of, or n without it, is the width "
            "and must be at least 2"
        )
    for name, neutral in UNDRAWN.items():
        value = getattr(params, name)
        if value not in neutral:
            yield (
                f"{name} is {value} with use_beam_search; beam search chooses by "
                f"log-probability; give {name}={neutral[0]}"
            )


def _for_beams_only(params: SamplingParams) -> Iterator[str]:
    for name, neutral in {"early_stopping": False, "length_penalty": 1.0}.items():
        value = getattr(params, name)
        if value != neutral:
            yield (
                f"{name} is {value!r} without use_beam_search; it is for beams alone: leave it out "
                "or give use_beam_search=True"
            )

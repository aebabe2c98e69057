"""Sampling parameters of a request: sampling, stop conditions and output format."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NoReturn,
    Self,
    SupportsFloat,
    SupportsIndex,
    TypeAlias,
)

import pagedserve.checks as checks
from pagedserve.errors import RequestError
from pagedserve.sampling_checks import CHECKS, contradictions
from pagedserve.structured_outputs import StructuredOutputsParams
from pagedserve.vllm_names import ABSENT_PARAMS, is_neutral

if TYPE_CHECKING:
    from torch import Tensor

LogitsProcessor: TypeAlias = "Callable[[list[int], Tensor], Tensor]"
_AnyLogitsProcessor: TypeAlias = (
    "LogitsProcessor | Callable[[list[int], list[int], Tensor], Tensor]"
)
EarlyStopping: TypeAlias = bool | Literal["never"]
# The class and its name until vLLM 0.9.
GuidedDecodingParams = StructuredOutputsParams

_NUM_WITH_PROMPT: Final = 3
# Token ids as JSON keys; no id has more digits.
_DIGITS: Final = re.compile("[0-9]{1,18}")
# None is a value of its parameter: no limit.
_LEN: Final = "max_tokens"


class RequestOutputKind(Enum):
    """Which outputs of a request ``step`` returns.

    CUMULATIVE: one per step with everything so far.  DELTA: one per step with what is new.
    FINAL_ONLY: the last one only.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, init=False)
class SamplingParams:
    """The sampling parameters of one request.

    Each value is checked when it is set, by the constructor or by assignment.  Combinations of
    values are checked by the constructor and again when a request is created, which keeps a copy.

    Attributes:
        n: Number of outputs to return, at least 1.
        best_of: Number of sequences to sample, of which the ``n`` most likely are returned; the
            width of a beam search.  At least ``n``; None is ``n``.
        presence_penalty: Subtracted from the logit of each token in the output, from -2 to 2.
        frequency_penalty: The same, multiplied by the token's count in the output, from -2 to 2.
        repetition_penalty: Divides the logit of each token in the prompt or output, or multiplies
            it where it is negative; from 1e-30 to 1e30.
        temperature: Divides the logits; 0 is greedy sampling.  Values below 0.00001 become 0.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: Keep the k most likely tokens; -1 or 0 keeps all.
        min_p: Keep tokens with at least this fraction of the highest probability, in [0, 1].
        seed: Seed of the request's random numbers, which gives the same tokens in any batch. None,
            or -1, derives them from the engine's seed and the request's ordinal.
        use_beam_search: Return the ``n`` most likely outputs of a beam search with ``best_of``
            beams, at least 2; requires temperature 0 and no top_p, top_k or min_p.
        length_penalty: The log-probability of a beam is divided by its length to this power, from
            -10 to 10.
        early_stopping: When a beam search ends, once ``best_of`` beams have ended: True at once,
            False when a better one is unlikely, "never" only when a better one is impossible.
        stop: Strings that end the request; one or a list.
        stop_token_ids: Further tokens that end the request; the token is part of ``token_ids``. Its
            text is omitted, as for the end-of-sequence token.
        bad_words: Words that must not be generated, as the tokenizer encodes them.
        include_stop_str_in_output: Whether the text includes the stop string or token that ended
            it.
        ignore_eos: Continue after the end-of-sequence token; not with ``structured_outputs``.
        max_tokens: Maximum number of new tokens, at least 1; None sets no limit.  The engine's
            ``max_model_len`` may end the request earlier.
        min_tokens: Minimum number of new tokens before an end-of-sequence or stop token; not with
            ``structured_outputs``.
        logprobs: Number of most likely tokens to return with the log-probability of each new token;
            -1 is the whole vocabulary, None returns none.
        prompt_logprobs: The same for each prompt token.  With ``max_tokens`` 1 the prompt may have
            ``max_model_len`` tokens, since the new token is not computed further.
        detokenize: Produce text; ``stop`` requires it.
        skip_special_tokens: Omit special tokens from the text.
        spaces_between_special_tokens: Accepted for compatibility without effect: the tokenizers of
            transformers 5 add no such spaces.
        logit_bias: Values added to the logits of tokens: a mapping of token id to a number from
            -1e30 to 1e30, stored as pairs sorted by id.
        allowed_token_ids: The only tokens that may be sampled, at least one; None allows all.
        logits_processors: Called in turn with the output token ids and the logits, ``[V]``; one
            with three arguments gets the prompt's token ids first.  Each returns the logits for the
            next.
        truncate_prompt_tokens: Number of last prompt tokens to keep, at least 1; -1 keeps as many
            as leave space for a new one, None all.
        structured_outputs: Format that the text must match: ``StructuredOutputsParams``, or a
            mapping of its names.  Generation ends with the format, or earlier by ``max_tokens``.
        output_kind: Which outputs are returned before the last.  Beam search and ``best_of`` above
            ``n`` return only the last in any case.

    Raises:
        RequestError: A value out of range (the message lists what is accepted), two parameters that
            contradict each other, or one that does not exist or is not supported yet, by name.
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
    max_tokens: int | None
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
    structured_outputs: StructuredOutputsParams | None
    output_kind: RequestOutputKind

    def __init__(  # noqa: PLR0917  # in vLLM's order
        self,
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
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        max_tokens: SupportsIndex | None = 16,
        min_tokens: SupportsIndex = 0,
        logprobs: SupportsIndex | None = None,
        prompt_logprobs: SupportsIndex | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        logits_processors: "Iterable[_AnyLogitsProcessor] | None" = None,
        truncate_prompt_tokens: SupportsIndex | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        bad_words: Iterable[str] | None = None,
        logit_bias: Mapping[int, SupportsFloat] | Iterable[tuple[int, float]] | None = None,
        allowed_token_ids: Iterable[SupportsIndex] | None = None,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        guided_decoding: StructuredOutputsParams | Mapping[str, Any] | None = None,
        **later: object,
    ) -> None:
        # The name until vLLM 0.9.
        if structured_outputs is None:
            structured_outputs = guided_decoding
        # All arguments by name; _CHECKS has one entry for each.
        given = locals()
        _refuse_unless_neutral(later)
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, given[name]))
        self.check()

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _CHECKS:
            _refuse_unknown({name: value})
        object.__setattr__(self, name, _CHECKS[name](name, value))

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Construct from arguments where None is the default, except for ``max_tokens``.

        Keys of ``logit_bias`` may be strings of digits, as in JSON.
        """
        given = {name: value for name, value in given.items() if value is not None or name == _LEN}
        if "logit_bias" in given:
            biases = dict(given["logit_bias"])
            given["logit_bias"] = {_token_id(token): bias for token, bias in biases.items()}
        return cls(**given)

    def clone(self) -> Self:
        """Return a copy that shares no mutable state."""
        copied = object.__new__(type(self))
        for name in _CHECKS:
            object.__setattr__(copied, name, getattr(self, name))
        return copied

    def check(self) -> None:
        """Check the combination of the values.

        Raises:
            RequestError: Two values contradict each other.
        """
        error = next(contradictions(self), None)
        if error is not None:
            raise error

    def resolved(self, *, max_model_len: int, vocab_size: int) -> Self:
        """Return a checked copy for one engine, with -1 replaced by numbers.

        Args:
            max_model_len: Maximum tokens of a sequence.
            vocab_size: Vocabulary size of the model.

        Raises:
            RequestError: As ``check``.
        """
        self.check()
        params = self.clone()
        if params.logprobs == -1:
            params.logprobs = vocab_size
        if params.prompt_logprobs == -1:
            params.prompt_logprobs = vocab_size
        if params.truncate_prompt_tokens == -1:
            params.truncate_prompt_tokens = max(1, max_model_len - 1)
        return params

    def with_prompt(self, token_ids: Sequence[int]) -> Self:
        """Bind the prompt to the logits processors that take it."""
        if not any(map(_takes_prompt, self.logits_processors)):
            return self
        prompt, params = list(token_ids), self.clone()
        params.logits_processors = tuple(
            _bound(processor, prompt) if _takes_prompt(processor) else processor
            for processor in self.logits_processors
        )
        return params

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is greedy: each token is the most likely one."""
        return not self.use_beam_search and (self.temperature == 0 or self.top_k == 1)

    @property
    def max_num_running_seqs(self) -> int:
        """Maximum number of sequences that run at once: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses_best(self) -> bool:
        """Whether more sequences are sampled than are returned."""
        return not self.use_beam_search and self.max_num_running_seqs > self.n

    @property
    def keeps_logprobs(self) -> bool:
        """Whether the log-probability of each sampled token is needed, to return or to rank."""
        return not self.use_beam_search and (self.logprobs is not None or self.chooses_best)


def _token_id(key: object) -> object:
    """Convert a key of ``logit_bias``, which may be a string of digits."""
    if not isinstance(key, str):
        return key
    if _DIGITS.fullmatch(key) is None:
        raise RequestError(
            f"logit_bias has the key {key!r}; keys must be token ids in digits", param="logit_bias"
        )
    return int(key)


def _output_kind(name: str, value: object) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        checks.refuse(name, value, "a RequestOutputKind: CUMULATIVE, DELTA or FINAL_ONLY")
    return value


_CHECKS: Final[dict[str, checks.Check[object]]] = {**CHECKS, "output_kind": _output_kind}


def _refuse_unless_neutral(given: dict[str, object]) -> None:
    for name, value in given.items():
        if name not in ABSENT_PARAMS:
            _refuse_unknown({name: value})
        if not is_neutral(value, ABSENT_PARAMS[name]):
            raise RequestError(f"not supported yet: {name}={value!r}; leave it out")


def _refuse_unknown(given: dict[str, object]) -> NoReturn:
    ((name, value),) = given.items()
    accepted = ", ".join(_CHECKS)
    raise RequestError(f"unknown sampling parameter: {name}={value!r}; accepted: {accepted}")


def _takes_prompt(processor: LogitsProcessor) -> bool:
    """Whether a logits processor has three arguments, the first of which is the prompt."""
    try:
        return len(inspect.signature(processor).parameters) == _NUM_WITH_PROMPT
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def _bound(processor: Any, prompt: list[int]) -> LogitsProcessor:
    def bound(token_ids: list[int], logits: "Tensor") -> "Tensor":
        changed: Tensor = processor(prompt, token_ids, logits)
        return changed

    bound.__name__ = getattr(processor, "__name__", type(processor).__name__)
    return bound


@dataclass(kw_only=True, slots=True)
class BeamSearchParams:
    """Parameters of ``LLM.beam_search``.

    Attributes:
        beam_width: Number of beams, and of outputs per prompt; at least 1.
        max_tokens: Maximum new tokens of a beam.
        ignore_eos: Continue after the model's end-of-sequence token.
        temperature: Only 0 is accepted: beam search does not sample.
        length_penalty: The log-probability of a beam is divided by its length to this power.
        include_stop_str_in_output: Whether the text includes the token that ended it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Convert to sampling parameters; a single beam is greedy sampling.

        Raises:
            RequestError: A value is invalid.
        """
        beams: dict[str, Any] = {}
        if self.beam_width != 1:
            beams = {
                "use_beam_search": True,
                "length_penalty": self.length_penalty,
                "early_stopping": "never",
            }
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            logprobs=0,
            include_stop_str_in_output=self.include_stop_str_in_output,
            **beams,
        )

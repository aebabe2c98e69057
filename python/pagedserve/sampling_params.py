"""How the tokens of one request are chosen, what its text shows, and when it ends."""

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
# What stands for a token id in JSON; more digits have none.
_DIGITS: Final = re.compile("[0-9]{1,18}")
# Its None means something of its own: no limit.
_LEN: Final = "max_tokens"


class RequestOutputKind(Enum):
    """Which outputs of a request its caller gets, where the engine is driven step by step.

    CUMULATIVE: one a step with everything so far.  DELTA: one a step with what is new.  FINAL_ONLY:
    the last alone.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, init=False)
class SamplingParams:
    """The sampling parameters of one request.

    Each value is checked when it is given, here or by assignment; whether the values go together
    is checked here and again when a request is made with them.  Requests keep a copy.

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
            None, or -1, derives them from the engine's seed and the request's ordinal.
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
        ignore_eos: Go on past the model's end-of-sequence token; not with ``structured_outputs``.
        max_tokens: At most this many new tokens, at least 1; None sets no limit.  The engine's
            ``max_model_len`` may end the request earlier.
        min_tokens: No end-of-sequence or stop token before this many new tokens; not with
            ``structured_outputs``.
        logprobs: Return so many likeliest tokens with each new one's log-probability; -1 is
            the whole vocabulary, None is nothing.
        prompt_logprobs: The same for each token of the prompt.  With ``max_tokens`` 1 the prompt
            may have ``max_model_len`` tokens: nothing is computed from the new one.
        detokenize: Make text; without it ``stop`` cannot be found.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Taken for the field's sake: the tokenizers of transformers
            5 put no spaces there, whatever it says.
        logit_bias: What to add to the logits of which tokens: given as a mapping of token id to
            number from -1e30 to 1e30, held as pairs in the order of the ids.
        allowed_token_ids: The only tokens that may come, at least one; None allows all.
        logits_processors: Called in turn with the output token ids and the logits, ``[V]``, those
            with three arguments with the prompt's token ids before them; each returns the logits
            to go on with.
        truncate_prompt_tokens: Keep so many of the prompt's last tokens, at least 1; -1 keeps as
            many as leave room for a new one, None all.
        structured_outputs: What the text must be: ``StructuredOutputsParams``, or a mapping of
            their names.  It ends there; ``max_tokens`` may end it before.
        output_kind: Which outputs come before the last.  Beam searches, and requests for the best
            of several, have the last alone in any case.

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
        # All arguments by name: _CHECKS has one entry for each.
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
        """As the constructor, where None leaves any parameter but ``max_tokens`` at its default.

        Keys of ``logit_bias`` may be token ids in digits, as JSON has them.
        """
        given = {name: value for name, value in given.items() if value is not None or name == _LEN}
        if "logit_bias" in given:
            biases = dict(given["logit_bias"])
            given["logit_bias"] = {_token_id(token): bias for token, bias in biases.items()}
        return cls(**given)

    def clone(self) -> Self:
        """A copy that shares nothing that could change."""
        copied = object.__new__(type(self))
        for name in _CHECKS:
            object.__setattr__(copied, name, getattr(self, name))
        return copied

    def check(self) -> None:
        """Check that the values go together.

        Raises:
            RequestError: Two that contradict each other.
        """
        error = next(contradictions(self), None)
        if error is not None:
            raise error

    def resolved(self, *, max_model_len: int, vocab_size: int) -> Self:
        """A checked copy for one engine, with numbers in place of -1.

        Args:
            max_model_len: Tokens of a sequence.
            vocab_size: Of the model.

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
        """Hand the prompt to the logits processors that take it."""
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
        """Whether each token is the likeliest one, so that nothing is drawn at random."""
        return not self.use_beam_search and (self.temperature == 0 or self.top_k == 1)

    @property
    def max_num_running_seqs(self) -> int:
        """Sequences of the request that run at once, at most: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses_best(self) -> bool:
        """Whether more sequences are sampled than are returned."""
        return not self.use_beam_search and self.max_num_running_seqs > self.n

    @property
    def keeps_logprobs(self) -> bool:
        """Whether the log-probability of each drawn token is wanted: to show, or to choose by."""
        return not self.use_beam_search and (self.logprobs is not None or self.chooses_best)


def _token_id(key: object) -> object:
    """A key of ``logit_bias``, which may be a token id in digits."""
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
    except (TypeError, ValueError):  # of some builtins nobody knows
        return False


def _bound(processor: Any, prompt: list[int]) -> LogitsProcessor:
    def bound(token_ids: list[int], logits: "Tensor") -> "Tensor":
        changed: Tensor = processor(prompt, token_ids, logits)
        return changed

    bound.__name__ = getattr(processor, "__name__", type(processor).__name__)
    return bound


@dataclass(kw_only=True, slots=True)
class BeamSearchParams:
    """A beam search, for ``LLM.beam_search``.

    Attributes:
        beam_width: Beams, and outputs a prompt; at least 1.
        max_tokens: New tokens of a beam.
        ignore_eos: Go on past the model's end-of-sequence token.
        temperature: 0 alone: a search draws nothing.
        length_penalty: A beam's log-probability is divided by its length to this power.
        include_stop_str_in_output: Whether the text holds the token that ended it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """The same search as sampling parameters; a single beam is greedy sampling.

        Raises:
            RequestError: A value that cannot be.
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

"""What a caller gets back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from pagedserve.lora.request import LoRARequest

if TYPE_CHECKING:  # programs that talk to a server know outputs, and have no numpy
    import numpy as np
    from numpy.typing import NDArray

FinishReason: TypeAlias = Literal["stop", "length", "abort", "ignored", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token, before penalties, biases, temperature and filters.

    Of beams: how likely it was to the search, after penalties and biases.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: Its place among all tokens, 1 for the likeliest.
        decoded_token: Its text alone; None where nothing is detokenised.
    """

    logprob: float
    rank: int
    decoded_token: str | None


# One entry a token: the likeliest tokens of its position and the token itself, by id.
Logprobs: TypeAlias = Sequence[dict[int, Logprob]]


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: Its place among the continuations of the request.
        text: What ``token_ids`` say, without the stop string or token that ended them; empty where
            nothing is detokenised.
        token_ids: Every new token, the one that ended it included.
        cumulative_logprob: Sum of the log-probabilities of ``token_ids``; None unless
            ``logprobs``, ``best_of`` above ``n`` or beams made them known.  Beams sum what they
            search by: the log-probabilities after penalties and biases.
        logprobs: One entry a token; None unless asked for.
        finish_reason: None while it goes on; "stop" (end-of-sequence, a stop token or a stop
            string), "length" (``max_tokens`` or ``max_model_len``), "abort" (by the caller),
            "ignored" (the scheduler can never run it, or run it on) or "error" (the request's own
            doing, such as a logits processor that raised).
        stop_reason: The stop token's id or the stop string; None for the end-of-sequence token;
            the reason in words where ``finish_reason`` is "ignored" or "error".
        lora_request: The adapter that it was answered with.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None

    def add(self, later: Self) -> None:
        """Take in the delta that follows this one."""
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs = [*self.logprobs, *later.logprobs]
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the wall clock.

    Their differences are those of a clock that nobody sets.

    A request that is computed again after a preemption keeps its first times.

    Attributes:
        arrival_time: When it was added.
        first_scheduled_time: When a step first computed something of it.
        first_token_time: When its first new token was there.
        last_token_time: When its newest token was there.
        finished_time: When it ended.
        scheduler_time: Seconds that the scheduler took for the steps between arrival and end.
        num_preemptions: How often it gave its place to others, by recompute or by swap.
        num_recomputed_tokens: Tokens that had been computed and were given up, by preemption or a
            step that failed, summed over its sequences.
        num_draft_tokens: Guesses at its tokens that were checked.
        num_accepted_tokens: Those of them that were right.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    scheduler_time: float = 0.0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that computed something of it."""
        return seconds_between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first new token."""
        return seconds_between(self.arrival_time, self.first_token_time)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from the first step that computed something of it to the first new token."""
        return seconds_between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first new token to the end."""
        return seconds_between(self.first_token_time, self.finished_time)

    @property
    def inference_time(self) -> float | None:
        """Seconds from the first step that computed something of it to the end."""
        return seconds_between(self.first_scheduled_time, self.finished_time)

    def time_per_output_token(self, num_tokens: int) -> float | None:
        """Seconds from the first new token to the newest, for each further one.

        Args:
            num_tokens: New tokens of a sequence; with fewer than two the answer is None.
        """
        seconds = seconds_between(self.first_token_time, self.last_token_time)
        return None if seconds is None or num_tokens <= 1 else seconds / (num_tokens - 1)


@dataclass(slots=True)
class RequestOutput:
    """A request as it stands.

    Attributes:
        request_id: As given to ``add_request``.
        prompt: Its text, or None where token ids were given.
        prompt_token_ids: The prompt's tokens, as computed (``truncate_prompt_tokens`` obeyed); one
            list for all outputs of a request.
        prompt_logprobs: One entry a prompt token, None for the first, which nothing foretells;
            None unless asked for.
        outputs: Its continuations: the best first with ``best_of`` above ``n`` and with beams,
            otherwise in the order of their indices.
        finished: Whether this is the last output of the request.
        metrics: When what happened.
        lora_request: The adapter that it was answered with.
        encoder_prompt: What an encoder reads, as text; None where token ids were given, or the
            model has none.
        encoder_prompt_token_ids: Its token ids; None where the model has none.
        num_cached_tokens: Prompt tokens that the prefix cache had when it first ran; None before.
        pooled: What a model that pools made of the prompt, float32 ``[F]``, as the model gives it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    pooled: "NDArray[np.float32] | None" = None

    def add(self, later: Self) -> None:
        """Take in the delta that follows this one."""
        own = {completion.index: completion for completion in self.outputs}
        for completion in later.outputs:
            if completion.index in own:
                own[completion.index].add(completion)
            else:
                self.outputs.append(completion)
        self.outputs.sort(key=lambda completion: completion.index)
        self.prompt_logprobs = later.prompt_logprobs
        self.finished = later.finished
        self.num_cached_tokens = later.num_cached_tokens


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam that a search found.

    Attributes:
        tokens: Prompt and new tokens.
        text: What they say, the prompt included.
        logprobs: One entry a new token.
        cum_logprob: Sum of the new tokens' log-probabilities.
        finish_reason: "stop" or "length".
        stop_reason: As of a ``CompletionOutput``.
    """

    tokens: list[int]
    text: str
    logprobs: Logprobs | None
    cum_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(cls, output: RequestOutput, decode: Callable[[list[int]], str]) -> Self:
        """From the output of a request that searched; ``decode`` is the tokenizer's."""
        beams = []
        for completion in output.outputs:
            tokens = [*output.prompt_token_ids, *completion.token_ids]
            beams.append(
                BeamSearchSequence(
                    tokens=tokens,
                    text=decode(tokens),
                    logprobs=completion.logprobs,
                    cum_logprob=completion.cumulative_logprob,
                    finish_reason=completion.finish_reason,
                    stop_reason=completion.stop_reason,
                )
            )
        return cls(beams)


@dataclass(slots=True)
class PoolingOutput:
    """What a prompt became.

    Attributes:
        data: A vector of a model that embeds, float64 ``[F]``; of one that names classes their
            probabilities.
    """

    data: "NDArray[np.float64]"


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt that was pooled.

    Attributes:
        request_id: Its name in the engine.
        outputs: What it became.
        prompt_token_ids: The prompt's tokens, as computed.
        num_cached_tokens: Those that the prefix cache had.
        finished: True.
    """

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class EmbeddingOutput:
    """What a prompt became.

    Attributes:
        embedding: The vector's numbers.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """What a prompt is.

    Attributes:
        probs: The probability of each class, in the order of the model's own labels.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How near two texts are.

    Attributes:
        score: The cosine of the angle between their embeddings, or what a cross-encoder says.
    """

    score: float


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt that was embedded.

    Attributes:
        request_id: Its name in the engine.
        outputs: The vector.
        prompt_token_ids: The prompt's tokens, as computed.
        num_cached_tokens: Those that the prefix cache had.
        finished: True.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class ClassificationRequestOutput:
    """A prompt that was classified.

    Attributes:
        request_id: Its name in the engine.
        outputs: What it is.
        prompt_token_ids: The prompt's tokens, as computed.
        num_cached_tokens: Those that the prefix cache had.
        finished: True.
    """

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class ScoringRequestOutput:
    """A pair of texts that was compared.

    Attributes:
        request_id: The names of both in the engine.
        outputs: How near they are.
        prompt_token_ids: The tokens of both.
        num_cached_tokens: Those that the prefix cache had.
        finished: True.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


def seconds_between(start: float | None, end: float | None) -> float | None:
    """From one time to another; None where one of them did not come."""
    return None if start is None or end is None else end - start

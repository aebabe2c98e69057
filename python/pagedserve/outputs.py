"""Outputs returned to the caller: completions, beams, embeddings, classes and scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeAlias, TypeVar

from pagedserve.lora.request import LoRARequest

if TYPE_CHECKING:  # HTTP clients import this module without numpy
    import numpy as np
    from numpy.typing import NDArray

Pooled = TypeVar("Pooled")

FinishReason: TypeAlias = Literal["stop", "length", "abort", "ignored", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token, before penalties, biases, temperature and filters.

    In beam search: the log-probability that the search uses, after penalties and biases.

    Attributes:
        logprob: Natural logarithm of the token's probability.
        rank: Rank among all tokens of the vocabulary; 1 is the most likely.  An engine sets it.
        decoded_token: Text of the token alone; None without detokenization.
    """

    logprob: float
    rank: int = None  # type: ignore[assignment]  # those of an engine have it
    decoded_token: str | None = None


# Logprobs of one position, by token id: the sampled token, then the most likely tokens.
Logprobs: TypeAlias = Sequence[dict[int, Logprob]]


@dataclass
class CompletionOutput:
    """One completion of a prompt; further attributes can be set.

    Attributes:
        index: Index of the completion within the request.
        text: Detokenized text without the stop string or token that ended it; empty without
            detokenization.
        token_ids: Generated token ids, including the one that ended the completion.
        cumulative_logprob: Sum of the log-probabilities of ``token_ids``; None unless ``logprobs``,
            ``best_of`` above ``n`` or beam search computes them.  Beam search sums
            log-probabilities after penalties and biases.
        logprobs: One entry per token; None unless requested.
        finish_reason: None while generation continues; "stop" (end-of-sequence, a stop token or a
            stop string), "length" (``max_tokens`` or ``max_model_len``), "abort" (by the caller),
            "ignored" (the request can never be scheduled, or not any longer) or "error" (caused by
            the request, such as a logits processor that raised).
        stop_reason: Id of the stop token, or the stop string; None for the end-of-sequence token; a
            message where ``finish_reason`` is "ignored" or "error".
        lora_request: Adapter that generated it.
        label_logprobs: Log-probabilities of the labels of its branch, as the next token; that of
            no speech, for a transcript with timestamps and ``logprobs``; otherwise None.
        routed_experts: None, as in vLLM unless requested.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    label_logprobs: list[float] | None = None
    routed_experts: None = None

    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None

    def add(self, later: Self) -> None:
        """Append the delta that follows this one."""
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs = [*self.logprobs, *later.logprobs]
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps and counters of a request; times in seconds of the wall clock.

    Differences between them are those of a monotonic clock.

    A request that is recomputed after a preemption keeps its first times.

    Attributes:
        arrival_time: When it was added.
        first_scheduled_time: When a step first computed any of its tokens.
        first_token_time: When its first new token was available.
        last_token_time: When its newest token was available.
        finished_time: When it ended.
        scheduler_time: Seconds spent in the scheduler for the steps between arrival and end.
        num_preemptions: Number of preemptions, by recompute or by swap.
        num_recomputed_tokens: Computed tokens that were dropped by preemption or a failed step,
            summed over its sequences.
        num_draft_tokens: Draft tokens that were verified.
        num_accepted_tokens: Draft tokens that were accepted.
        num_prediction_tokens: Draft tokens of the request's prediction that were verified.
        num_accepted_prediction_tokens: Those of them that were accepted.
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
    num_prediction_tokens: int = 0
    num_accepted_prediction_tokens: int = 0

    @property
    def queued_ts(self) -> float:
        """``arrival_time``, under a name of newer releases of vLLM, as the next three."""
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float:
        """``first_scheduled_time``; 0 before."""
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        """``first_token_time``; 0 before."""
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        """``last_token_time``; 0 before."""
        return self.last_token_time or 0.0

    @property
    def first_token_latency(self) -> float:
        """``time_to_first_token``; 0 before, as in vLLM."""
        return self.time_to_first_token or 0.0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that computed any of its tokens."""
        return seconds_between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first new token."""
        return seconds_between(self.arrival_time, self.first_token_time)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from the first step that computed any of its tokens to the first new token."""
        return seconds_between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first new token to the end."""
        return seconds_between(self.first_token_time, self.finished_time)

    @property
    def inference_time(self) -> float | None:
        """Seconds from the first step that computed any of its tokens to the end."""
        return seconds_between(self.first_scheduled_time, self.finished_time)

    def time_per_output_token(self, num_tokens: int) -> float | None:
        """Mean seconds per output token after the first.

        Args:
            num_tokens: New tokens of a sequence; the result is None for fewer than two.
        """
        seconds = seconds_between(self.first_token_time, self.last_token_time)
        return None if seconds is None or num_tokens <= 1 else seconds / (num_tokens - 1)


@dataclass
class RequestOutput:
    """Output of a request so far; further attributes can be set.

    Attributes:
        request_id: Request id, as given to ``add_request``.
        prompt: Text of the prompt, or None if it was given as token ids.
        prompt_token_ids: Token ids of the prompt as computed, after ``truncate_prompt_tokens``; one
            list shared by all outputs of a request.
        prompt_logprobs: One entry per prompt token, None for the first, which has no prediction,
            and for those that were not computed before an abort; None unless requested.
        outputs: Completions: best first with ``best_of`` above ``n`` and with beam search, else in
            the order of their indices.
        finished: Whether this is the last output of the request.
        metrics: Timestamps and counters of the request; an engine sets it.
        lora_request: Adapter that the request used.
        encoder_prompt: Text of the encoder's prompt; None if it was given as token ids, or if the
            model has no encoder.
        encoder_prompt_token_ids: Its token ids; None if the model has no encoder.
        num_cached_tokens: Prompt tokens found in the prefix cache when it first ran; None before.
        pooled: Vector of a pooling model, float32 ``[F]``.
        kv_transfer_params: None, as in vLLM without KV transfer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = None  # type: ignore[assignment]  # those of an engine have it
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    pooled: "NDArray[np.float32] | None" = None
    kv_transfer_params: None = None

    def add(self, later: Self) -> None:
        """Append the delta that follows this one."""
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
    """One beam of a finished beam search.

    Attributes:
        tokens: Token ids of prompt and output.
        text: Decoded text, including the prompt.
        logprobs: One entry per new token.
        cum_logprob: Sum of the new tokens' log-probabilities.
        finish_reason: "stop" or "length".
        stop_reason: As in ``CompletionOutput``.
    """

    tokens: list[int]
    text: str
    logprobs: Logprobs | None
    cum_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(
        cls, output: RequestOutput, decode: Callable[[list[int]], str], *, keeps_end: bool
    ) -> Self:
        """Convert the output of a beam search request.

        Args:
            output: The output.
            decode: The tokenizer's.
            keeps_end: Whether tokens and text have the token that ended a beam.
        """
        beams = []
        for completion in output.outputs:
            has_end = completion.finish_reason == "stop" and not keeps_end
            new = completion.token_ids[:-1] if has_end else completion.token_ids
            tokens = [*output.prompt_token_ids, *new]
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
    """Pooled vector of a prompt.

    Attributes:
        data: Embedding of the prompt, float64 ``[F]``; class probabilities for a classification
            model.
    """

    data: "NDArray[np.float64]"


@dataclass(slots=True)
class PooledRequestOutput(Generic[Pooled]):
    """Output of a request to a pooling model.

    Attributes:
        request_id: Request id in the engine; of a score, those of both texts.
        outputs: What was made of the pooled vector.
        prompt_token_ids: Token ids of the prompt, as computed; of a score, those of both texts.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        finished: True.
    """

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """Output of a pooling request: the pooled vector."""

    __slots__ = ()


@dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of a prompt.

    Attributes:
        embedding: Components of the vector.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of components."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """Class probabilities of a prompt.

    Attributes:
        probs: Probability of each class, in the order of the model's labels.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Similarity score of two texts.

    Attributes:
        score: Cosine of the angle between their embeddings, or the output of a cross-encoder.
    """

    score: float


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """Output of an embedding request: the embedding."""

    __slots__ = ()


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """Output of a classification request: the class probabilities."""

    __slots__ = ()


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """Output of a scoring request: the score."""

    __slots__ = ()


def seconds_between(start: float | None, end: float | None) -> float | None:
    """Seconds between two times; None if either is None."""
    return None if start is None or end is None else end - start

"""What a caller gets back."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "abort", "ignored"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: Its place among the continuations of the request.
        text: What ``token_ids`` say, special tokens left out.
        token_ids: Every new token, the one that ended it included.
        finish_reason: None while it goes on; "stop" (end-of-sequence or a stop token),
            "length" (``max_tokens`` or ``max_model_len``), "abort" (by the caller) or "ignored"
            (the scheduler can never run it, or run it on).
        stop_reason: The stop token's id; None for the end-of-sequence token; the scheduler's
            reason where ``finish_reason`` is "ignored".
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock (monotonic).

    A request that is computed again after a preemption keeps its first times.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that computed something of it."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first new token."""
        return _between(self.arrival_time, self.first_token_time)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request as it stands.

    Attributes:
        request_id: As given to ``add_request``.
        prompt: Its text, or None where token ids were given.
        prompt_token_ids: The prompt's tokens.
        outputs: Its continuations.
        finished: Whether this is the last output of the request.
        metrics: When what happened.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


def _between(start: float, end: float | None) -> float | None:
    return None if end is None else end - start

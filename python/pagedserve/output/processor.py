"""Sampled tokens become ends of sequences and request outputs.

Owns what the caller of a request sees: tokens, text, reasons, times.  A step goes through here
twice: ``judge`` only looks, so that a step whose update is refused leaves no trace; ``apply``
records, and may be called again for the same step (an interrupt may come in the middle).

Costs: about a microsecond a token; text is made only for outputs that somebody gets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedserve.output.detokenizer import Detokenizer, TextStream
from pagedserve.output.stop import Finish, StopRule
from pagedserve.outputs import CompletionOutput, RequestMetrics, RequestOutput


@dataclass(slots=True)
class OutputState:
    """What the caller of one request is told, so far.

    Attributes:
        request_id: The caller's name for it.
        prompt: Its text, or None where token ids were given.
        prompt_token_ids: The prompt's tokens.
        rule: When it ends.
        metrics: When what happened.
        text_stream: Text as it comes; None where only the final output is wanted.
        token_ids: New tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    rule: StopRule
    metrics: RequestMetrics
    text_stream: TextStream | None
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """The tokens of one step and what each means to its sequence; nothing recorded yet.

    Attributes:
        states: One for each sampled row.
        counts: How many new tokens each had before the step.
        tokens: The new token of each.
        finishes: Why each ends, or None.
    """

    states: Sequence[OutputState]
    counts: list[int]
    tokens: list[int]
    finishes: list[Finish | None]

    @property
    def finish_flags(self) -> NDArray[np.uint8]:
        """[S], 1 where the sequence ends: what ``Scheduler.update`` takes."""
        return np.array([finish is not None for finish in self.finishes], dtype=np.uint8)


class OutputProcessor:
    """From sampled tokens to request outputs."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    def open_stream(self) -> TextStream:
        """A text stream for a new request whose caller follows it."""
        return self._detokenizer.stream()

    def judge(self, states: Sequence[OutputState], tokens: NDArray[np.int32]) -> JudgedStep:
        """Decide which sequences end with their new token; records nothing.

        Args:
            states: One for each sampled row.
            tokens: [S], the token of each.
        """
        values: list[int] = tokens.tolist()
        counts = [len(state.token_ids) for state in states]
        finishes = [
            state.rule.check(token, count + 1)
            for state, token, count in zip(states, values, counts, strict=True)
        ]
        return JudgedStep(states, counts, values, finishes)

    def apply(self, step: JudgedStep, now: float) -> None:
        """Record the tokens and times of a step; a second call changes nothing.

        Args:
            step: What ``judge`` made.
            now: Seconds of the engine's clock.
        """
        for state, count, token in zip(step.states, step.counts, step.tokens, strict=True):
            state.token_ids[count:] = (token,)
            if not count:
                state.metrics.first_token_time = now

    def follow(self, state: OutputState) -> RequestOutput:
        """The output of a request that goes on, for a caller who follows it."""
        assert state.text_stream is not None  # noqa: S101  # only for callers who follow
        state.text_stream.advance(state.token_ids)
        return _request_output(state, state.text_stream.text, None)

    def conclude(self, state: OutputState, finish: Finish, now: float) -> RequestOutput:
        """The last output of a request.

        Args:
            state: The request.
            finish: Why it ended.
            now: Seconds of the engine's clock.
        """
        state.metrics.finished_time = now
        if state.text_stream is None:
            text = self._detokenizer.decode(state.token_ids)
        else:
            state.text_stream.advance(state.token_ids)
            text = state.text_stream.text + state.text_stream.rest()
        return _request_output(state, text, finish)


def _request_output(state: OutputState, text: str, finish: Finish | None) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=list(state.token_ids),
        finish_reason=finish and finish.reason,
        stop_reason=finish and finish.stop_reason,
    )
    return RequestOutput(
        request_id=state.request_id,
        prompt=state.prompt,
        prompt_token_ids=state.prompt_token_ids,
        outputs=[completion],
        finished=finish is not None,
        metrics=state.metrics,
    )

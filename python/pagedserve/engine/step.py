"""A step of the engine, from scheduling to its end."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import SchedulerOutputs
from pagedserve.engine.prompt_logprobs import ScoredRow
from pagedserve.engine.request import Request, Sequence
from pagedserve.executor.protocol import StepHandle


@dataclass(slots=True, eq=False)
class Step:
    """A scheduled step; S is the number of its samples.

    Attributes:
        scheduled: Decisions of the step.
        started: Time of scheduling, by the scheduler's clock; None if another step was running.
        parent_rows: Row of each sample, int32 ``[S]``.
        sequences: The sequence of each sample.
        scored: Rows of prompts whose log-probabilities are requested.
        encoded: Requests whose images or encoder inputs the step needs, by row.
        handle: Handle of the launched work; None if there is no work, or it is not launched yet.
        is_async: Whether it has ended for the scheduler though its tokens are not known.
        drafts: Draft tokens of rows by the first of their samples; each adds a sample.
    """

    scheduled: SchedulerOutputs
    started: float | None
    parent_rows: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    sequences: list[Sequence] = field(default_factory=list)
    scored: list[ScoredRow] = field(default_factory=list)
    encoded: dict[int, Request] = field(default_factory=dict)
    handle: StepHandle | None = None
    is_async: bool = False
    drafts: dict[int, list[int]] = field(default_factory=dict)

    @property
    def may_go_on(self) -> bool:
        """Whether any sequence may continue after its next token."""
        return any(map(_may_go_on, self.sequences))


def _may_go_on(sequence: Sequence) -> bool:
    """Whether a sequence may continue after its next token."""
    request = sequence.request
    return not request.is_finished and len(sequence.token_ids) + 1 < request.rule.max_tokens

"""A step of the engine, from scheduling to its end."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import SchedulerOutputs
from pagedserve.engine.prompt_logprobs import ScoredRow
from pagedserve.engine.request import Request, Sequence
from pagedserve.executor.protocol import StepHandle
from pagedserve.sampling.rows import RowSampling


@dataclass(slots=True, eq=False)
class Step:
    """A scheduled step; S is the number of its samples.

    Attributes:
        started: Time of scheduling, by the scheduler's clock; None if another step was running.
            under way.
        parent_rows: Row of each sample, int32 ``[S]``.
        sequences: The sequence of each sample.
        scored: Rows of prompts whose log-probabilities are requested.
        with_images: Requests whose prompts have images, by row.
        handle: Handle of the launched work; None if there is no work, or it is not launched yet.
        is_async: Whether it has ended for the scheduler though its tokens are not known.
        drafts: Draft tokens of rows by the first of their samples; each adds a sample.
    """

    scheduled: SchedulerOutputs
    started: float | None
    parent_rows: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    sequences: list[Sequence] = field(default_factory=list)
    scored: list[ScoredRow] = field(default_factory=list)
    with_images: dict[int, Request] = field(default_factory=dict)
    handle: StepHandle | None = None
    is_async: bool = False
    drafts: dict[int, list[int]] = field(default_factory=dict)

    def rows(self, after: "Step | None") -> list[RowSampling]:
        """Build the sampler inputs; ``after`` is the step whose tokens are not known yet."""
        if self.drafts:
            return self._drafted_rows()
        unknown = {id(sequence) for sequence in after.sequences} if after else ()
        return [
            sequence.constant_row or sequence.row(num_unknown=int(id(sequence) in unknown))
            for sequence in self.sequences
        ]

    def _drafted_rows(self) -> list[RowSampling]:
        return [
            sequence.constant_row or sequence.row(drafts=drafts)
            for sequence, drafts in self._samples()
        ]

    def _samples(self) -> Iterator[tuple[Sequence, list[int]]]:
        """The sequence of each sample, and the draft tokens before it."""
        first, drafts = 0, self.drafts.get(0, [])
        for sample, sequence in enumerate(self.sequences):
            if sample > first + len(drafts):
                first, drafts = sample, self.drafts.get(sample, [])
            yield sequence, drafts[: sample - first]

    @property
    def may_go_on(self) -> bool:
        """Whether any sequence may continue after its next token."""
        return any(map(_may_go_on, self.sequences))


def _may_go_on(sequence: Sequence) -> bool:
    """Whether a sequence may continue after its next token."""
    request = sequence.request
    return not request.is_finished and len(sequence.token_ids) + 1 < request.rule.max_tokens

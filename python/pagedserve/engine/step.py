"""A step of the engine, from scheduling to its end, and its input for the executor."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import SchedulerOutputs
from pagedserve.engine.prompt_logprobs import ScoredRow, prompt_targets
from pagedserve.engine.request import Request, RequestTable, Sequence
from pagedserve.executor.protocol import HostBuffers, StepHandle, StepInput
from pagedserve.inputs.encoder_prompts import EncoderInput
from pagedserve.inputs.prompt_images import PromptImages
from pagedserve.sampling.rows import RowSampling


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


def make_input(
    step: Step, requests: RequestTable, buffers: HostBuffers, after: Step | None
) -> StepInput:
    """Create the input of a step whose arrays are in the buffers.

    Args:
        step: The step; gets the requests of its images and encoder inputs.
        requests: Requests known to the scheduler.
        buffers: Buffers of the executor.
        after: Previous step, if its tokens are not known yet.
    """
    return StepInput.of(
        step.scheduled,
        _sampling_rows(step, after),
        prompts=prompt_targets(step.scored) if step.scored else None,
        images=_images(step, requests, buffers) if requests.has_images else {},
        encoder_inputs=_encoder_inputs(step, requests, buffers) if requests.has_encoders else {},
        after=None if after is None else after.handle,
    )


def _sampling_rows(step: Step, after: Step | None) -> list[RowSampling]:
    """Sampling parameters of each sample."""
    if step.drafts:
        return [
            sequence.constant_row or sequence.row(drafts=drafts)
            for sequence, drafts in _drafted_samples(step)
        ]
    unknown = {id(sequence) for sequence in after.sequences} if after else ()
    return [
        sequence.constant_row or sequence.row(num_unknown=int(id(sequence) in unknown))
        for sequence in step.sequences
    ]


def _drafted_samples(step: Step) -> Iterator[tuple[Sequence, list[int]]]:
    """The sequence of each sample, and the draft tokens before it."""
    first, drafts = 0, step.drafts.get(0, [])
    for sample, sequence in enumerate(step.sequences):
        if sample > first + len(drafts):
            first, drafts = sample, step.drafts.get(sample, [])
        yield sequence, drafts[: sample - first]


def _images(step: Step, requests: RequestTable, buffers: HostBuffers) -> dict[int, PromptImages]:
    """Images of the rows' prompts, by row."""
    found = {}
    sequences = requests.by_handles(buffers.row_handles[: step.scheduled.num_rows].tolist())
    for row, sequence in enumerate(sequences):
        if sequence.request.images is not None:
            found[row] = sequence.request.images
            step.encoded[row] = sequence.request
    return found


def _encoder_inputs(
    step: Step, requests: RequestTable, buffers: HostBuffers
) -> dict[int, EncoderInput]:
    """Encoder inputs of the requests that start in a step, by row.

    A request starts where the first token of any of its rows is computed: once, and again after a
    preemption by recompute.  Its rows share one encoder output, so the first represents all.
    """
    starts = buffers.query_start[: step.scheduled.num_rows]
    rows = (buffers.positions[starts] == 0).nonzero()[0]
    sequences = requests.by_handles(buffers.row_handles[rows].tolist())
    found: dict[int, EncoderInput] = {}
    groups: set[int] = set()
    for row, sequence in zip(rows.tolist(), sequences, strict=True):
        request = sequence.request
        if request.encoder is not None and request.group not in groups:
            groups.add(request.group)
            found[row] = request.encoder
            step.encoded[row] = request
    return found

"""Input of a step for the executor, from the requests of its rows."""

from collections.abc import Iterator

from pagedserve.engine.prompt_logprobs import prompt_targets
from pagedserve.engine.request import RequestTable, Sequence
from pagedserve.engine.step import Step
from pagedserve.executor.protocol import HostBuffers, StepInput
from pagedserve.inputs.encoder_prompts import EncoderInput
from pagedserve.inputs.prompt_images import PromptImages
from pagedserve.sampling.rows import RowSampling


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

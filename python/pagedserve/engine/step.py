"""A step of the engine: its input for the executor, and what its tokens change.

``make_input`` collects what a scheduled step needs.  ``process_step`` decides from its tokens which
sequences continue, fork or end, and changes nothing, so a step whose update the scheduler refuses
leaves no trace; ``record_step`` applies the update once the scheduler has.

Costs: under a microsecond per plain token (one sequence, no text or log-probabilities before the
end); some three for others, plus a text search if there are stop strings.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import SchedulerOutputs
from pagedserve.engine.prompt_logprobs import ScoredRow, prompt_targets
from pagedserve.engine.request import Request, RequestTable, Sequence, text_failure
from pagedserve.executor.protocol import HostBuffers, StepHandle, StepInput
from pagedserve.inputs.encoder_prompts import EncoderInput
from pagedserve.inputs.prompt_images import PromptImages
from pagedserve.output.beam import Beam, BeamRow, BeamSearch
from pagedserve.output.detokenizer import TextStream
from pagedserve.output.logprobs import TokenLogprob, TopLogprobs
from pagedserve.output.stop import Finish, StopMatch, find_stop, is_by_token
from pagedserve.sampling.results import SampledRows
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
    def may_continue(self) -> bool:
        """Whether any sequence may continue after its next token."""
        return any(
            not sequence.request.is_finished
            and len(sequence.token_ids) + 1 < sequence.request.rule.max_tokens
            for sequence in self.sequences
        )


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


_NO_DRAFTS: Final[Mapping[int, SequenceOf[int]]] = MappingProxyType({})


class TokenDetail(NamedTuple):
    """Details of the new tokens of an output, if they are needed.

    Attributes:
        text: Detokenized text after them, if every token is detokenized.
        stop_match: Stop string that the last one completes.
        logprobs: Log-probability of each, if requested.
        labels: Log-probabilities of the labels of a branch.
    """

    text: TextStream | None
    stop_match: StopMatch | None
    logprobs: list[TokenLogprob]
    labels: list[float] | None = None


class RequestUpdate(NamedTuple):
    """Update of a request that is not plain.

    Attributes:
        request: The request.
        outputs: Indices of its outputs among those of the step.
        search: Beam search after the step.
        failure: Finish reason of a failure, which overrides its tokens.
        is_done: Whether all its sequences have ended.
    """

    request: Request
    outputs: range
    search: BeamSearch | None = None
    failure: Finish | None = None
    is_done: bool = False


@dataclass(slots=True)
class StepUpdate:
    """Update of all requests; entry i of the first four lists is output i of the step.

    Attributes:
        sequences: Sequence of the token; for beam search, the beams that continue.
        tokens: New tokens; only the last of each output, if draft tokens were accepted before it.
        finishes: Finish reason of the sequence, or None.
        parents: Sampled row that it continues, not decreasing.
        accepted: Accepted draft tokens before the token of an output, if any.
        details: Details of outputs, if they are needed.
        requests: Updates of requests that are not plain.
    """

    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finishes: list[Finish | None] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    accepted: dict[int, list[int]] = field(default_factory=dict)
    details: dict[int, TokenDetail] = field(default_factory=dict)
    requests: list[RequestUpdate] = field(default_factory=list)

    def add(self, row: int, sequence: Sequence, token: int, finish: Finish | None) -> None:
        """Add an output."""
        self.sequences.append(sequence)
        self.tokens.append(token)
        self.finishes.append(finish)
        self.parents.append(row)

    def forget(self, first_output: int) -> None:
        """Drop the outputs from one on."""
        for outputs in (self.sequences, self.tokens, self.finishes, self.parents):
            del outputs[first_output:]
        for known in (self.accepted, self.details):
            for output in [output for output in known if output >= first_output]:
                del known[output]

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, accepted draft tokens included."""
        return len(self.tokens) + sum(map(len, self.accepted.values()))

    def packed(self) -> tuple[NDArray[np.int32], list[int]]:
        """Start of each output's tokens, int32 ``[K + 1]``, and all tokens."""
        tokens, starts = [], [0]
        for output, token in enumerate(self.tokens):
            tokens += [*self.accepted.get(output, ()), token]
            starts.append(len(tokens))
        return np.array(starts, np.int32), tokens

    def finish_flags(self) -> NDArray[np.uint8]:
        """[K], 1 where the sequence ends."""
        return np.array([finish is not None for finish in self.finishes], dtype=np.uint8)


def process_step(
    sequences: SequenceOf[Sequence],
    sampled: SampledRows,
    drafts: Mapping[int, SequenceOf[int]] = _NO_DRAFTS,
) -> StepUpdate:
    """Apply stop conditions to the tokens of a step.

    Args:
        sequences: Sequence of each of the S sampled rows; those of a request are adjacent.
            Sequences of requests that have ended meanwhile are skipped.
        sampled: Sampled tokens of the rows.
        drafts: Draft tokens of rows that have some, each with a further row after it.
    """
    update = StepUpdate()
    tokens: list[int] = sampled.tokens.tolist()
    starts: list[int] = sampled.draw_start.tolist()
    row = 0
    while row < len(sequences):
        sequence = sequences[row]
        request = sequence.request
        if request.is_finished:
            row += 1
        elif request.is_plain and row not in sampled.errors and row not in drafts:
            token = tokens[starts[row]]
            finish = request.rule.check(token, len(sequence.token_ids) + 1)
            update.add(row, sequence, token, finish)
            row += 1
        else:
            end = row + 1
            while end < len(sequences) and sequences[end].request is request:
                end += 1
            _process_request(update, sequences[row:end], row, sampled, drafts)
            row = end
    return update


def _process_request(
    update: StepUpdate,
    sequences: SequenceOf[Sequence],
    first_row: int,
    sampled: SampledRows,
    drafts: Mapping[int, SequenceOf[int]],
) -> None:
    """Process the rows of one request, from ``first_row`` on."""
    request = sequences[0].request
    first_output = len(update.tokens)
    row, parents = first_row, {}
    while row < first_row + len(sequences):
        if row in sampled.errors:
            failure = Finish("error", sampled.errors[row])
            update.requests.append(RequestUpdate(request, range(0), None, failure, is_done=True))
            return
        parents[row] = sequences[row - first_row]
        row += 1 + len(drafts.get(row, ()))
    try:
        _process_outputs(update, parents, sampled, drafts)
    except Exception as error:  # noqa: BLE001  # tokenizers may raise any exception
        update.forget(first_output)
        failure = text_failure(error)
        update.requests.append(RequestUpdate(request, range(0), None, failure, is_done=True))


def _process_outputs(
    update: StepUpdate,
    parents: Mapping[int, Sequence],
    sampled: SampledRows,
    drafts: Mapping[int, SequenceOf[int]],
) -> None:
    """Process the outputs of one request; ``parents`` are the rows that they continue."""
    first_output = len(update.tokens)
    request = next(iter(parents.values())).request
    if request.search is not None:
        _process_beams(update, request.search, parents, sampled)
        return
    for row, parent in parents.items():
        draws = range(int(sampled.draw_start[row]), int(sampled.draw_start[row + 1]))
        for index, draw in enumerate(draws):
            sequence = parent if index == 0 else request.new_sequence(index)
            _process_tokens(update, sequence, row, draw, sampled, drafts=drafts.get(row, ()))
    if request.is_plain:
        return
    outputs = range(first_output, len(update.tokens))
    is_done = all(update.finishes[output] is not None for output in outputs)
    update.requests.append(RequestUpdate(request, outputs, is_done=is_done))


def _process_tokens(
    update: StepUpdate,
    sequence: Sequence,
    row: int,
    draw: int,
    sampled: SampledRows,
    *,
    drafts: SequenceOf[int],
) -> None:
    """Process the sample of a row, and those after draft tokens while these are accepted."""
    request = sequence.request
    rule, text, match, finish = request.rule, sequence.text, None, None
    watches_text = rule.strings is not None and text is not None
    accepted: list[int] = []
    logprobs: list[TokenLogprob] = []
    for place in range(len(drafts) + 1):
        token = int(sampled.tokens[draw + place])
        num_tokens = len(sequence.token_ids) + place + 1
        finish = rule.check(token, num_tokens)
        if watches_text and text is not None and not is_by_token(finish):
            before, text = text, text.advanced((token,))
            match = find_stop(rule, before, text, num_tokens)
            if match is not None:
                finish = Finish("stop", match.string)
        if sequence.logprobs is not None:
            logprobs.append(_token_logprob(request, row + place, draw + place, sampled))
        # If a row after an accepted draft cannot be sampled, it fails in the next step.
        is_last = place == len(drafts) or row + place + 1 in sampled.errors
        if is_last or finish is not None or token != drafts[place]:
            break
        accepted.append(token)
    if accepted:
        update.accepted[len(update.tokens)] = accepted
    labels = sampled.labels[row].tolist() if row in sampled.labels else None
    if watches_text or logprobs or labels:
        detail = TokenDetail(text if watches_text else None, match, logprobs, labels)
        update.details[len(update.tokens)] = detail
    update.add(row, sequence, token, finish)


def _token_logprob(request: Request, row: int, draw: int, sampled: SampledRows) -> TokenLogprob:
    found = sampled.logprobs
    assert found is not None  # noqa: S101  # requested
    return TokenLogprob.of(
        found.token_logprobs[draw],
        found.token_ranks[draw],
        found.top_token_ids[row],
        found.top_logprobs[row],
        request.params.logprobs or 0,
    )


def _process_beams(
    update: StepUpdate,
    search: BeamSearch,
    parents: Mapping[int, Sequence],
    sampled: SampledRows,
) -> None:
    sequences, candidates = list(parents.values()), sampled.candidates
    request, first_row = sequences[0].request, min(parents)
    assert candidates is not None  # noqa: S101  # requested
    rows = []
    for row in parents:
        ids, logprobs = candidates.token_ids[row], candidates.logprobs[row]
        top = None
        if (num_top := request.params.logprobs) is not None:
            top = TopLogprobs.of(ids, logprobs, num_top)
        rows.append(BeamRow(ids, logprobs, top))
    beams = tuple(sequence.beam for sequence in sequences if sequence.beam is not None)
    # The scheduler's order of the beams; the decisions of the search do not depend on it.
    result = replace(search, beams=beams).step(rows, partial(Beam.finish_by, rule=request.rule))
    first_output = len(update.tokens)
    for beam, parent in zip(result.search.beams, result.parents, strict=True):
        sequence = request.new_sequence(0, beam=beam)
        update.add(first_row + parent, sequence, beam.token_ids[-1], None)
    outputs = range(first_output, len(update.tokens))
    update.requests.append(RequestUpdate(request, outputs, result.search, is_done=result.is_done))


def record_step(
    update: StepUpdate, handles: SequenceOf[int], table: RequestTable, now: float
) -> list[Request]:
    """Apply an update that the scheduler has accepted.

    Args:
        update: Update of the step.
        handles: The scheduler's handle of each output; empty if it created none, and then every
            sequence keeps its handle.
        table: Table of the sequences that continue.
        now: Seconds of the wall clock.

    Returns:
        The requests that got tokens, including those that end (``is_finished``).
    """
    plain = [sequence for sequence in update.sequences if sequence.request.is_plain]
    for output, drafts in update.accepted.items():
        update.sequences[output].token_ids.extend(drafts)
    for sequence, token, finish in zip(
        update.sequences, update.tokens, update.finishes, strict=True
    ):
        if sequence.beam is None:
            sequence.token_ids.append(token)
        sequence.finish = finish
    for output, detail in update.details.items():
        _record_detail(update.sequences[output], detail)
    touched = []
    for sequence in plain:
        request = sequence.request
        request.is_finished = sequence.finish is not None
        touched.append(request)
    for entry in update.requests:
        _record_request(entry, update, handles, table)
        touched.append(entry.request)
    for request in touched:
        metrics = request.metrics
        if request.finish is None:
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
    return touched


def _record_detail(sequence: Sequence, detail: TokenDetail) -> None:
    if sequence.logprobs is not None:
        for logprob in detail.logprobs:
            sequence.logprobs.append(logprob)
            sequence.cumulative_logprob += logprob.logprob
    if detail.text is not None:
        sequence.text = detail.text
    sequence.stop_match = detail.stop_match
    if detail.labels is not None:
        sequence.label_logprobs = detail.labels


def _record_request(
    entry: RequestUpdate, update: StepUpdate, handles: SequenceOf[int], table: RequestTable
) -> None:
    request = entry.request
    request.finish = entry.failure
    request.is_finished = entry.is_done
    if entry.search is not None:
        request.search = entry.search
    if entry.failure is not None or not handles:
        return
    sequences = [update.sequences[output] for output in entry.outputs]
    if request.search is not None or len(sequences) > len(request.sequences):
        own = [handles[output] for output in entry.outputs]
        table.replace_sequences(request, sequences, own)
    for sequence in sequences:
        if sequence.finish is not None:
            table.drop_sequence(sequence)

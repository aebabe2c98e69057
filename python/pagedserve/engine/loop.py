"""The step loop: a step is decided and launched, its results are judged and taken.

Owns the steps between their decisions and their end, oldest first.  There is one, or there are
two: where every token of a step is known on the device alone, the next step is decided and
launched before the host knows them (it *goes ahead*), so that the device has work while the host
judges.  The scheduler then takes every sequence for one that goes on; a sequence that turns out to
have ended runs once more for nothing.  Invariants:

1. Between two calls at most one step is open, and none if no request is left.
2. A step that failed leaves every request as it was; the next step does the same work again.
   Where the failure came after the scheduler had taken the tokens, the requests have them too.
3. Requests see the same tokens, whether steps go ahead or not.

Costs: outside the executor a step is three border calls, four where it goes ahead, and about five
microseconds a row.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import Scheduler, SchedulerOutputs
from pagedserve.engine.prompts import ScoredRow, prompt_logprobs, prompt_targets, scored_rows
from pagedserve.engine.requests import LivingSequence, Request, RequestTable
from pagedserve.engine.stats import EngineStats, step_line
from pagedserve.engine.step import OpenStep, call_into
from pagedserve.errors import StaleHandleError, StepError
from pagedserve.executor.executor import Executor
from pagedserve.output.judge import JudgedStep, Living, RequestStep, judge
from pagedserve.output.processor import OutputProcessor
from pagedserve.output.stop import Finish
from pagedserve.outputs import RequestOutput

logger = logging.getLogger(__name__)

# The engine's clock; the scheduler sees no other.
now: Final = time.monotonic


class StepLoop:
    """Runs the steps of an engine.

    Attributes:
        ready: Outputs that nobody has fetched yet, by request id.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        processor: OutputProcessor,
        requests: RequestTable,
        stats: EngineStats,
        *,
        num_gpu_blocks: int,
        max_num_seqs: int,
        goes_ahead: bool,
    ) -> None:
        """Put the parts together.

        Args:
            scheduler: Decides.
            executor: Computes.
            processor: Makes the outputs.
            requests: Those that the scheduler knows.
            stats: To count in.
            num_gpu_blocks: KV blocks of the scheduler.
            max_num_seqs: Sequences of a step.
            goes_ahead: Whether the next step may be launched before the tokens of one are known.
        """
        self.ready: dict[str, RequestOutput] = {}
        self._scheduler = scheduler
        self._executor = executor
        self._processor = processor
        self._requests = requests
        self._stats = stats
        self._num_gpu_blocks = num_gpu_blocks
        self._token_start = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._goes_ahead = goes_ahead
        self._steps: list[OpenStep] = []

    def step(self) -> SchedulerOutputs:
        """Run a step to its end, and launch the next where it can go ahead.

        Returns:
            The decisions of the step that ended.
        """
        try:
            if not self._steps:
                self._begin()
            step = self._steps[0]
            if self._go_ahead(step):
                self._begin()
                self._stats.num_steps_ahead += self._steps[-1].launched is not None
            self._finish(step)
            if not len(self._requests):
                self._finish_all()  # nobody would call again
        except BaseException:
            self._recover()
            raise
        return step.scheduled[0]

    def settle(self) -> None:
        """Run the step that is launched, if one is, to its end."""
        try:
            self._finish_all()
        except BaseException:
            self._recover()
            raise

    def note_scheduling(self, request: Request) -> None:
        """Take down what the scheduler knows about a request; if it has forgotten it, no more."""
        metrics = request.output.metrics
        metrics.scheduler_time = self._stats.scheduler_seconds - request.scheduler_seconds
        try:
            counts = self._scheduler.group_stats(request.group)
        except StaleHandleError:
            return  # ended by the scheduler itself, or by the next step, which went ahead
        metrics.num_preemptions = counts.num_preemptions
        metrics.num_recomputed_tokens = counts.num_recomputed_tokens

    def _finish_all(self) -> None:
        while self._steps:
            self._finish(self._steps[0])

    def _begin(self) -> None:
        """Decide a step and launch it."""
        step = OpenStep()
        self._steps.append(step)
        started = now()
        call_into(step.scheduled, partial(self._scheduler.schedule, started))
        self._stats.scheduler_seconds += now() - started
        for group, _ in step.scheduled[0].preempted:
            preempted = self._requests.by_group(group)
            if preempted is not None:
                self.note_scheduling(preempted)
        if not step.scheduled[0].is_empty:
            self._launch(step)

    def _launch(self, step: OpenStep) -> None:
        scheduled, buffers = step.scheduled[0], self._executor.buffers
        self._scheduler.prepare_inputs(buffers.writable())
        self._note_scheduled(scheduled)
        step.parent_rows = buffers.sample_rows[: scheduled.num_samples].copy()
        step.seqs = buffers.row_handles[step.parent_rows].tolist()
        step.living = self._requests.by_seqs(step.seqs)
        step.scored = self._scored_rows(scheduled)
        first = self._steps[0]
        previous_tokens = first.launched.tokens() if first.launched is not None else None
        unknown = set(first.seqs) if first is not step else set()
        rows = [
            one.row(num_unknown=int(seq in unknown))
            for one, seq in zip(step.living, step.seqs, strict=True)
        ]
        targets = prompt_targets(step.scored)
        step.launched = self._executor.launch(scheduled, rows, targets, previous_tokens)

    def _go_ahead(self, step: OpenStep) -> bool:
        """End a step for the scheduler before its tokens are known, if nothing depends on them."""
        if not self._goes_ahead or step.launched is None:
            return False
        if step.launched.is_async_safe and any(map(self._may_go_on, step.living)):
            step.is_ahead = self._scheduler.update_async(step.scheduled[0].step_id)
        return step.is_ahead

    def _may_go_on(self, one: LivingSequence) -> bool:
        """Whether a sequence is not sure to end with its next token."""
        num_tokens = len(one.sequence.token_ids) + 1
        return self._requests.holds(one.request) and num_tokens < one.request.output.rule.max_tokens

    def _finish(self, step: OpenStep) -> None:
        """Take what a step gave; it is the oldest."""
        self._end_ignored(step.scheduled[0])
        if step.launched is None:
            self._steps.remove(step)
            return
        results = step.launched.results()
        step.prompts = prompt_logprobs(step.scored, results.prompts)
        rows = [self._living(one) for one in step.living]
        step.judged = judge(rows, step.parent_rows, results.sampled)
        self._note_endings(step.judged)
        call_into(step.handles, self._closing(step, step.judged, results.sampled.tokens))
        self._take(step)

    def _living(self, one: LivingSequence) -> Living | None:
        """A sequence as the judge wants it; None if its request has ended meanwhile."""
        if not self._requests.holds(one.request):
            return None
        return Living(one.request.output, one.sequence)

    def _closing(
        self, step: OpenStep, judged: JudgedStep, tokens: NDArray[np.int32]
    ) -> Callable[[], tuple[NDArray[np.int64], object] | None]:
        """The call that tells the scheduler what came out of a step."""
        step_id = step.scheduled[0].step_id
        if step.is_ahead:
            return partial(self._scheduler.resolve_tokens, step_id, tokens)
        return partial(
            self._scheduler.update,
            step_id,
            judged.parent_rows,
            self._token_start[: len(judged.tokens) + 1],
            judged.tokens,
            judged.finish_flags,
        )

    def _take(self, step: OpenStep) -> None:
        """Record a closed step and make its outputs; may be called again for the same step."""
        if step.judged is None:
            return
        self._processor.apply(step.judged.requests, step.prompts, now())
        of_outputs = step.handles[0]
        handles: list[int] = [] if of_outputs is None else of_outputs[0].tolist()
        first = 0
        for one in step.judged.requests:
            num_outputs = len(one.outputs)
            request = self._requests.by_id(one.state.request_id)
            if request is not None:
                self._take_request(request, one, handles[first : first + num_outputs])
            first += num_outputs
        self._steps.remove(step)
        self._stats.num_generation_tokens += first

    def _take_request(self, request: Request, step: RequestStep, handles: list[int]) -> None:
        if step.is_done:
            # Where the step went ahead, the scheduler does not know yet.
            self._scheduler.abort(request.group)
            self._end(request, step.failure)
            return
        if request.output.max_num_seqs > 1:
            self._requests.spread(request, step.living(handles))
        if request.output.is_followed:
            self.ready[request.output.request_id] = self._processor.follow(request.output)

    def _recover(self) -> None:
        """Bring requests and scheduler together after steps that did not come to their end."""
        for step in list(self._steps):
            if step.scheduled:
                self._recover_step(step)
        self._steps.clear()
        for request in self._requests:
            self.note_scheduling(request)  # what has to be computed again

    def _recover_step(self, step: OpenStep) -> None:
        self._end_ignored(step.scheduled[0])
        if step.scheduled[0].is_empty:
            return
        try:
            self._scheduler.abandon(step.scheduled[0].step_id)
        except StepError:
            # Closed already: the interrupt came after the scheduler had taken the tokens.  Or
            # given up with the step before it, and then nothing has been judged.
            self._take(step)

    def _end(self, request: Request | None, finish: Finish | None) -> None:
        """Make the last output of a request; one that has ended already may be named again."""
        if request is not None:
            output = self._processor.conclude(request.output, finish, now())
            self.ready[request.output.request_id] = output
            self._requests.discard(request)

    def _end_ignored(self, scheduled: SchedulerOutputs) -> None:
        for group, reason, _ in scheduled.ignored_seq_groups:
            request = self._requests.by_group(group)
            if request is not None:
                self.note_scheduling(request)
            self._end(request, Finish("ignored", reason))

    def _scored_rows(self, scheduled: SchedulerOutputs) -> list[ScoredRow]:
        """Rows of prompts whose log-probabilities somebody wants."""
        if not self._requests.has_scored:
            return []
        buffers = self._executor.buffers
        seqs = buffers.row_handles[: scheduled.num_prefill_rows].tolist()
        return scored_rows(self._requests.by_seqs(seqs), buffers.query_start, buffers.positions)

    def _note_scheduled(self, scheduled: SchedulerOutputs) -> None:
        """Times and counts of a step about to run."""
        used = self._num_gpu_blocks - self._scheduler.num_free_gpu_blocks
        self._stats.note_step(scheduled, used)
        if scheduled.num_prefill_rows:
            seqs = self._executor.buffers.row_handles[: scheduled.num_prefill_rows].tolist()
            for living in self._requests.by_seqs(seqs):
                metrics = living.request.output.metrics
                if metrics.first_scheduled_time is None:
                    metrics.first_scheduled_time = now()
        if logger.isEnabledFor(logging.DEBUG):
            num_waiting = self._scheduler.num_waiting
            logger.debug("%s, %d waiting", step_line(scheduled, used), num_waiting)

    def _note_endings(self, judged: JudgedStep) -> None:
        """Ask the scheduler about requests that it is about to forget."""
        for step in judged.requests:
            request = self._requests.by_id(step.state.request_id) if step.is_done else None
            if request is not None:
                self.note_scheduling(request)

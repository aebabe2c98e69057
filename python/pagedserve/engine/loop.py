"""The step loop: schedule and launch the next step, process the last, roll back on failure.

Owns the launched steps, oldest first.  There are one or two: with asynchronous scheduling, where
every token of a step stays on the device, the next step is scheduled and launched before the host
knows them, so that the device has work while the host processes.  (The order of mini-sglang's
overlap loop.)  The scheduler then assumes that every sequence continues; one that turns out to
have ended takes part in one more step, whose token is discarded.  Invariants:

1. Between two calls at most one step is open, and none if no request is left.
2. A step that failed leaves every request unchanged; the next step repeats the same work.
3. Requests get the same tokens, whether steps are launched ahead or not.
4. Ctrl-C interrupts a step between its phases or within the model, never within the bookkeeping.

Costs: outside the executor a step is three border calls, four where the next is launched ahead, and
about a microsecond per plain row.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

import numpy as np

from pagedserve._core import GroupStats, Scheduler, SchedulerOutputs
from pagedserve.engine.drafting import Drafter
from pagedserve.engine.output_processor import make_output, merge_outputs
from pagedserve.engine.prompt_logprobs import record_prompts, scored_rows
from pagedserve.engine.request import Request, RequestTable, Sequence
from pagedserve.engine.stats import EngineStats, request_time, step_line
from pagedserve.engine.step import Step, StepUpdate, make_input, process_step, record_step
from pagedserve.executor.protocol import Executor, ModelOutput
from pagedserve.output.stop import Finish
from pagedserve.outputs import RequestOutput
from pagedserve.sigint import sigint_deferred

logger = logging.getLogger(__name__)

ABORTED: Final = Finish("abort")

# Clock of the scheduler.
now: Final = time.monotonic


class EngineLoop:
    """Runs the steps of an engine.

    Attributes:
        outputs: Outputs not yet returned by `step`, oldest first.
        failed: Requests of the steps that were rolled back last.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        requests: RequestTable,
        stats: EngineStats,
        *,
        num_gpu_blocks: int,
        max_num_seqs: int,
        async_scheduling: bool,
        drafter: Drafter | None = None,
    ) -> None:
        """Store the components.

        Args:
            scheduler: The scheduler.
            executor: Runs the model.
            requests: Requests known to the scheduler.
            stats: Counters to update.
            num_gpu_blocks: KV blocks of the scheduler.
            max_num_seqs: Maximum sequences per step.
            async_scheduling: Whether a step may be launched before the tokens of the last are
                known.
            drafter: Proposer of draft tokens; None without speculative decoding.
        """
        self.outputs: list[RequestOutput] = []
        self.failed: list[Request] = []
        self._scheduler = scheduler
        self._executor = executor
        self._requests = requests
        self._stats = stats
        self._num_gpu_blocks = num_gpu_blocks
        self._token_start = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._async_scheduling = async_scheduling
        self._drafter = drafter
        self._steps: deque[Step] = deque()
        self._is_torn = False

    def step(self) -> SchedulerOutputs:
        """Launch the next step if it can be launched ahead, and process the last.

        Returns:
            Decisions of the step that ended.
        """
        started, executor_seconds = now(), self._stats.executor_seconds
        self._begin()
        try:
            last = self._steps[0] if self._steps else self._launch_next(after=None)
            if self._can_launch_ahead(last):
                self._launch_next(after=last)
                self._stats.num_async_steps += self._steps[-1].handle is not None
            self._process(last)
            if not self._requests:
                self._process_all()  # no further call would process it
        except BaseException:
            self._roll_back()
            raise
        self._is_torn = False
        if last.handle is not None:
            seconds = now() - started
            self._stats.step_seconds.observe(seconds)
            seconds -= self._stats.executor_seconds - executor_seconds
            self._stats.host_step_seconds.observe(seconds)
        return last.scheduled

    def drain(self) -> None:
        """Process the launched step, if any, and launch no other."""
        self._begin()
        try:
            self._process_all()
        except BaseException:
            self._roll_back()
            raise
        self._is_torn = False

    def abort(self, request_ids: list[str]) -> list[RequestOutput]:
        """Abort unfinished requests; see ``LLMEngine.abort_request``."""
        known = {name: self._requests.by_id(name) for name in request_ids}
        # A running step may use their blocks, or end them.
        self.drain()
        with sigint_deferred():
            for name in request_ids:
                if (request := self._requests.by_id(name)) is not None:
                    self.end(request, ABORTED, self._scheduler.abort(request.group))
            outputs, self.outputs = self.outputs, []
            ended: dict[str, RequestOutput] = {}
            for output in outputs:
                name = output.request_id
                if name not in known:
                    self.outputs.append(output)
                elif (request := known[name]) is not None:
                    ended[name] = merge_outputs(request, ended.get(name), output)
        return list(ended.values())

    def end_failed(self, error: Exception, *, all_requests: bool) -> list[RequestOutput]:
        """End the requests of failed steps, or all; see ``LLMEngine.end_failed``."""
        finish = Finish("error", f"its steps failed: {type(error).__name__}: {error}")
        if all_requests:
            self._roll_back()  # a step that was launched ahead would keep its blocks
        with sigint_deferred():
            failed = [] if all_requests else self.failed
            for request in failed or list(self._requests):
                if self._requests.by_id(request.request_id) is request:
                    self.end(request, finish, self._scheduler.abort(request.group))
        outputs, self.outputs = self.outputs, []
        return outputs

    def close(self) -> None:
        """End all requests without outputs, and release the draft model."""
        self._roll_back()
        with sigint_deferred():
            for request in list(self._requests):
                self.end(request, ABORTED, self._scheduler.abort(request.group))
            self.outputs = []
        self._drafter = None

    def end(self, request: Request, finish: Finish | None, group_stats: GroupStats | None) -> None:
        """Remove a request, and create its last output.

        Args:
            request: Request that was not removed yet.
            finish: Finish reason of sequences that have none yet.
            group_stats: Statistics of its sequence group.
        """
        request.is_finished = True
        request.finish = finish or request.finish
        self._requests.discard(request)
        if self._drafter is not None:
            self._drafter.end(request)
        metrics = request.metrics
        metrics.finished_time = request_time()
        metrics.scheduler_time = self._stats.scheduler_seconds - request.start_seconds
        if group_stats is not None:
            self._record_group(request, group_stats)
        try:
            output = make_output(request)
        except Exception as error:  # noqa: BLE001  # tokenizers may raise any exception
            request.fail(error)
            output = make_output(request)
        self.outputs.append(output)
        request.sequences = []  # which refer to the request

    def _begin(self) -> None:
        if self._is_torn:  # a second interrupt stopped the rollback of the first
            self._roll_back()
        self._is_torn = True

    def _process_all(self) -> None:
        while self._steps:
            self._process(self._steps[0])

    def _launch_next(self, after: Step | None) -> Step:
        """Schedule and launch a step; ``after`` is the step whose tokens are not known yet."""
        with sigint_deferred():
            started = now()
            step = Step(self._scheduler.schedule(started), started if after is None else None)
            self._stats.scheduler_seconds += now() - started
            self._steps.append(step)
            self._record_groups(step.scheduled)
            if step.scheduled.is_empty:
                return step
            self._prepare(step, after)
            inputs = make_input(step, self._requests, self._executor.buffers, after)
        started = now()
        step.handle = self._executor.launch(inputs)
        self._stats.executor_seconds += now() - started
        return step

    def _prepare_samples(self, step: Step) -> None:
        """Have the core write the inputs, and look up the sequences of the samples."""
        buffers = self._executor.buffers
        self._scheduler.prepare_inputs(buffers.writable())
        step.parent_rows = buffers.sample_rows[: step.scheduled.num_samples].copy()
        handles: list[int] = buffers.row_handles[step.parent_rows].tolist()
        step.sequences = self._requests.by_handles(handles)

    def _draft(self, step: Step, drafter: Drafter) -> None:
        """Append draft tokens to rows of a step, if that makes it faster."""
        drafts = drafter.propose(step.scheduled, step.sequences, step.parent_rows)
        if drafts is not None:
            arrays = drafts.rows, drafts.token_start, drafts.tokens
            step.scheduled = self._scheduler.propose(step.scheduled.step_id, *arrays)
            step.drafts = drafts.by_sample
            self._prepare_samples(step)

    def _prepare(self, step: Step, after: Step | None) -> None:
        """Have the core write the inputs, and look up the sequences of the rows."""
        self._prepare_samples(step)
        if self._drafter is not None and after is None:  # all tokens are known
            self._draft(step, self._drafter)
        scheduled, buffers = step.scheduled, self._executor.buffers
        prefills = buffers.row_handles[: scheduled.num_prefill_rows].tolist()
        prefilling = self._requests.by_handles(prefills)
        self._record_scheduled(scheduled, prefilling)
        if self._requests.has_scored:
            step.scored = scored_rows(prefilling, buffers.query_start, buffers.positions)

    def _can_launch_ahead(self, step: Step) -> bool:
        """End a step for the scheduler before its tokens are known, if nothing depends on them."""
        if not self._async_scheduling or step.handle is None or not step.handle.is_async_safe:
            return False
        if self._drafter is not None and self._drafter.may_draft(step.scheduled):
            return False
        if step.may_continue:
            step.is_async = self._scheduler.update_async(step.scheduled.step_id)
        return step.is_async

    def _process(self, step: Step) -> None:
        """Process the result of the oldest step."""
        if step.handle is None:
            with sigint_deferred():
                self._steps.popleft()
                self._end_ignored(step.scheduled)
            return
        waiting_since = now()
        output = step.handle.results()
        self._stats.executor_seconds += now() - waiting_since
        self._stats.record_images(*output.image_lookups)
        if output.failed:
            self._end_failed_rows(step, output.failed)
            return
        if self._drafter is not None and step.started is not None:
            self._drafter.observe(step.scheduled, now() - step.started)
        with sigint_deferred():
            self._end_ignored(step.scheduled)
            update = process_step(step.sequences, output.sampled, step.drafts)
            handles, ended = self._update(step, update, output)
            self._steps.popleft()
            if self._drafter is not None:
                self._drafter.record(step, update)
            if output.prompt_logprobs is not None:
                record_prompts(step.scored, output.prompt_logprobs)
            if output.pooled is not None:
                for sequence, vector in zip(step.sequences, output.pooled, strict=True):
                    sequence.request.pooled = vector
            touched = record_step(update, handles, self._requests, request_time())
            self._stats.record_tokens(step.scheduled, update.num_tokens)
            for request in touched:
                self._give_out(request, ended)

    def _end_failed_rows(self, step: Step, failed: Mapping[int, str]) -> None:
        """End the requests of rows that failed; the next step repeats the work of the others."""
        self._roll_back()
        with sigint_deferred():
            for row, error in failed.items():
                request = step.encoded[row]
                if not request.is_finished:
                    self.end(request, Finish("error", error), self._scheduler.abort(request.group))

    def _update(
        self, step: Step, update: StepUpdate, output: ModelOutput
    ) -> tuple[list[int], dict[int, GroupStats]]:
        """Report the result of a step to the scheduler.

        Returns:
            The handle of each output's sequence, empty if the scheduler knew the sequences already,
            and the statistics of the groups that ended.
        """
        step_id = step.scheduled.step_id
        if step.is_async:
            self._scheduler.resolve_tokens(step_id, output.sampled.tokens)
            return [], {}
        token_start, tokens = self._token_start[: len(update.tokens) + 1], update.tokens
        if update.accepted:
            token_start, tokens = update.packed()
        handles, ended = self._scheduler.update(
            step_id,
            step.parent_rows[update.parents],
            token_start,
            np.array(tokens, dtype=np.int32),
            update.finish_flags(),
        )
        return handles.tolist(), dict(ended)

    def _give_out(self, request: Request, ended: dict[int, GroupStats]) -> None:
        """Create the output of a request that got tokens, if its caller needs it now."""
        if request.is_finished:
            # The scheduler does not know yet if the next step was launched ahead.
            group_stats = ended.get(request.group) or self._scheduler.abort(request.group)
            self.end(request, None, group_stats)
        elif request.is_streamed:
            if request.num_cached_tokens is None:
                self._record_group(request, self._scheduler.group_stats(request.group))
            try:
                self.outputs.append(make_output(request))
            except Exception as error:  # noqa: BLE001  # as above
                request.fail(error)
                self.end(request, None, self._scheduler.abort(request.group))

    def _roll_back(self) -> None:
        """Discard the open steps: requests and scheduler return to their state before them."""
        with sigint_deferred():
            for step in self._steps:
                self._end_ignored(step.scheduled)
            unfinished = [step for step in self._steps if not step.scheduled.is_empty]
            self._steps.clear()
            self.failed = [
                request
                for step in unfinished
                for scheduled in step.scheduled.scheduled_seq_groups
                if (request := self._requests.by_group(scheduled.group)) is not None
            ]
            if unfinished:
                self._scheduler.abandon(unfinished[0].scheduled.step_id)
            for request in self._requests:
                self._record_group(request, self._scheduler.group_stats(request.group))
            self._is_torn = False

    def _end_ignored(self, scheduled: SchedulerOutputs) -> None:
        for group, reason, group_stats in scheduled.ignored_seq_groups:
            request = self._requests.by_group(group)
            if request is not None:
                self.end(request, Finish("ignored", reason), group_stats)

    def _record_groups(self, scheduled: SchedulerOutputs) -> None:
        """Update the statistics of the groups that a step preempts or ends."""
        ended = {group: group_stats for group, _, group_stats in scheduled.ignored_seq_groups}
        for group in (*(group for group, _ in scheduled.preempted), *ended):
            request = self._requests.by_group(group)
            if request is not None:
                self._record_group(request, ended.get(group) or self._scheduler.group_stats(group))

    def _record_group(self, request: Request, group_stats: GroupStats) -> None:
        request.num_cached_tokens = group_stats.num_cached_tokens
        request.metrics.num_preemptions = group_stats.num_preemptions
        request.metrics.num_recomputed_tokens = group_stats.num_recomputed_tokens

    def _record_scheduled(self, scheduled: SchedulerOutputs, prefilling: list[Sequence]) -> None:
        """Update times and counters of a step that is about to run."""
        used = self._num_gpu_blocks - self._scheduler.num_free_gpu_blocks
        self._stats.record_step(scheduled, used)
        for sequence in prefilling:
            metrics = sequence.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = request_time()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s, %d waiting", step_line(scheduled, used), self._scheduler.num_waiting)

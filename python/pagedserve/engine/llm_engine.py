"""``LLMEngine``: requests in, one step at a time, outputs out.

Owns the scheduler, the executor and the requests.  Invariants:

1. The scheduler's groups and ``_requests`` name the same requests whenever no method runs, also
   after an exception or an interrupt in the middle of one.
2. A step that failed leaves every request as it was; the next step does the same work again.
   Where the failure came after the scheduler had taken the tokens, the requests have them too.
3. An output is returned once, by the step that made it or, if that one failed, by the next.

Costs: outside the executor a step is three border calls and about five microseconds a row.
"""

import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Final

import numpy as np
from transformers import PreTrainedTokenizerBase

from pagedserve._core import Scheduler, SchedulerOutputs
from pagedserve.engine.admission import Admission, CheckedRequest
from pagedserve.engine.args import EngineArgs
from pagedserve.engine.prompts import ScoredRow, prompt_logprobs, prompt_targets, scored_rows
from pagedserve.engine.requests import Request, RequestTable
from pagedserve.engine.setup import cache_config, memory_plan, scheduler_config
from pagedserve.engine.stats import EngineStats, StatsLine, step_line
from pagedserve.engine.step import OpenStep, call_into
from pagedserve.errors import InvariantError, RequestError, StepError
from pagedserve.executor.executor import Executor
from pagedserve.inputs import ParsedPrompt, Prompt, parse_prompt
from pagedserve.output.judge import JudgedStep, Living, RequestStep, judge
from pagedserve.output.processor import OutputProcessor
from pagedserve.output.stop import Finish
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_ABORTED: Final = Finish("abort")
# Seconds between two lines of statistics.
_STATS_INTERVAL: Final = 10.0

# The engine's clock; the scheduler sees no other.
_now = time.monotonic


class LLMEngine:
    """A model, its KV cache and a scheduler, driven by the caller step by step.

    Not thread-safe: all calls come from one thread.

    Attributes:
        tokenizer: The model's.
        stats: Sums over the engine's life.
        memory: Where the memory went.
    """

    def __init__(self, args: EngineArgs) -> None:
        """Load the model and make the KV cache.

        Raises:
            ConfigError: Arguments that contradict each other, the model or the memory.
            ModelLoadError: The model cannot be found, read or run.
        """
        self._executor = Executor(args.model_config)
        loaded = self._executor.loaded
        self.tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
        self._eos_token_ids = loaded.eos_token_ids
        config = scheduler_config(args, loaded.max_model_len)
        self.memory = memory_plan(args, self._executor, config)
        logger.info("%s", self.memory.describe())
        cache = cache_config(args, self.memory)
        self._scheduler = Scheduler(config, cache)
        self._executor.init_cache(
            num_gpu_blocks=cache.num_gpu_blocks,
            num_cpu_blocks=cache.num_cpu_blocks,
            block_size=cache.block_size,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_rows=config.max_num_seqs,
            max_model_len=config.max_model_len + config.num_lookahead_slots,
        )
        self._processor = OutputProcessor(loaded.tokenizer)
        self._admission = Admission(
            tokenizer=loaded.tokenizer,
            vocab_size=loaded.vocab_size,
            eos_token_ids=tuple(loaded.eos_token_ids),
            scheduler=config,
            cache=cache,
            processor=self._processor,
            seed=args.seed,
        )
        self._buffers = self._executor.buffers
        self._token_start = np.arange(args.max_num_seqs + 1, dtype=np.int32)
        self._num_added = 0
        self._requests = RequestTable()
        self._ready: dict[str, RequestOutput] = {}
        self.stats = EngineStats()
        self._stats_line = StatsLine(_now())

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        """The engine that ``args`` describe; the same as calling the class."""
        return cls(args)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, to look at: queues, free blocks, preemptions."""
        return self._scheduler

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and output together."""
        return self._admission.scheduler.max_model_len

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def has_unfinished_requests(self) -> bool:
        """Whether another ``step`` is wanted."""
        return len(self._requests) > 0 or len(self._ready) > 0

    def describe_backends(self) -> str:
        """One line for people: who computes attention and linear layers."""
        return self._executor.loaded.describe_backends()

    def stats_line(self) -> str:
        """One line for people: queues, KV cache, prefix hits, tokens/s since the last line."""
        num_blocks = self.memory.num_gpu_blocks
        return self._stats_line.write(self.stats, self._scheduler, num_blocks, _now())

    @property
    def seconds_since_stats(self) -> float:
        """Seconds since the last line of statistics."""
        return self._stats_line.age(_now())

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix.

        Returns:
            Whether it was done; False, and nothing is forgotten, while a request holds blocks.
        """
        return self._scheduler.reset_prefix_cache()

    def check_request(
        self, prompt: ParsedPrompt, params: SamplingParams, *, name: str = "the prompt"
    ) -> CheckedRequest:
        """Tokenise a prompt and check that the request can be run; takes up nothing.

        Args:
            prompt: As ``pagedserve.inputs`` parsed it.
            params: How to continue it.
            name: What an error calls the prompt.

        Raises:
            RequestError: What is wrong with the prompt or the parameters, and what is accepted.
        """
        return self._admission.check(prompt, params, name=name)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | CheckedRequest,
        sampling_params: SamplingParams | None = None,
        *,
        final_only: bool = False,
    ) -> None:
        """Take up a request; its first tokens come with later steps.

        Args:
            request_id: The caller's name for it, of no other unfinished request.
            prompt: Text, token ids, or what ``check_request`` made (with its own parameters).
            sampling_params: How to continue it; None is ``SamplingParams()``.
            final_only: Leave out the outputs before the last; spares their text.  Beam searches,
                and requests for the best of several, have the last output alone in any case.

        Raises:
            RequestError: A request that cannot be run; nothing was taken up.
        """
        self._check_id(request_id)
        if not isinstance(prompt, CheckedRequest):
            params = sampling_params or SamplingParams()
            prompt = self.check_request(parse_prompt(prompt, "the prompt"), params)
        new = self._admission.open(
            request_id,
            prompt,
            number=self._num_added,
            arrival_time=_now(),
            is_followed=not final_only,
        )
        add = partial(
            self._scheduler.add_seq_group,
            new.token_ids,
            arrival_time=new.output.metrics.arrival_time,
            max_num_running_seqs=prompt.params.max_num_running_seqs,
            salt=new.salt,
        )
        handles: list[tuple[int, int]] = []
        try:
            call_into(handles, add)
            group, seq = handles[0]
            seconds = self.stats.scheduler_seconds
            self._requests.add(Request(group, new.output, new.rows, seconds), seq)
        except BaseException:
            for group, _ in handles:
                self._scheduler.abort(group)
                self._discard(request_id)
            raise
        self._num_added += 1
        self.stats.num_prompt_tokens += len(new.token_ids)

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now; their blocks are free when this returns.

        Args:
            request_id: One id or several; ids of requests that have ended are passed over.

        Returns:
            The last output of each that was unfinished, with what it had so far and the finish
            reason "abort".
        """
        outputs = []
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            self._ready.pop(one, None)
            request = self._requests.by_id(one)
            if request is not None:
                self._note_scheduling(request)
                self._scheduler.abort(request.group)
                self._requests.discard(request)
                outputs.append(self._processor.conclude(request.output, _ABORTED, _now()))
        return outputs

    def step(self) -> list[RequestOutput]:
        """Schedule and run one step.

        Returns:
            Requests that ended, and those that got a token and whose callers follow them.

        Raises:
            InvariantError: The scheduler has nothing to do though requests wait: a bug.
        """
        started = _now()
        step = OpenStep()
        try:
            call_into(step.scheduled, partial(self._scheduler.schedule, started))
            self.stats.scheduler_seconds += _now() - started
            self._end_ignored(step.scheduled[0], started)
            if not step.scheduled[0].is_empty:
                self._run(step)
        except BaseException:
            self._recover(step)
            raise
        if len(self._requests) and not self._ready and _did_nothing(step.scheduled[0]):
            raise InvariantError(
                f"the scheduler has nothing to do though {len(self._requests)} requests wait"
            )
        outputs, self._ready = list(self._ready.values()), {}
        return outputs

    def _discard(self, request_id: str) -> None:
        request = self._requests.by_id(request_id)
        if request is not None:
            self._requests.discard(request)

    def _check_id(self, request_id: object) -> None:
        if not isinstance(request_id, str) or request_id in self._requests:
            raise RequestError(
                f"request_id is {request_id!r}; it must be a string that no other unfinished "
                "request has"
            )

    def _run(self, step: OpenStep) -> None:
        """Execute a step and take its tokens."""
        scheduled, buffers = step.scheduled[0], self._buffers
        self._scheduler.prepare_inputs(buffers.core)
        self._note_scheduled(scheduled)
        parent_rows = buffers.sample_rows[: scheduled.num_samples]
        living = self._requests.by_seqs(buffers.row_handles[parent_rows].tolist())
        scored = self._scored_rows(scheduled)
        results = self._executor.execute(
            scheduled, [one.row for one in living], prompt_targets(scored)
        )
        step.prompts = prompt_logprobs(scored, results.prompts)
        rows = [Living(one.request.output, one.sequence) for one in living]
        step.judged = judge(rows, parent_rows, results.sampled)
        self._note_endings(step.judged)
        update = partial(
            self._scheduler.update,
            scheduled.step_id,
            step.judged.parent_rows,
            self._token_start[: len(step.judged.tokens) + 1],
            step.judged.tokens,
            step.judged.finish_flags,
        )
        call_into(step.handles, update)
        self._take(step)

    def _take(self, step: OpenStep) -> None:
        """Record an updated step and make its outputs; may be called again for the same step."""
        if step.judged is None:
            return
        now = _now()
        self._processor.apply(step.judged.requests, step.prompts, now)
        handles: list[int] = step.handles[0].tolist()
        first = 0
        for one in step.judged.requests:
            num_outputs = len(one.outputs)
            request = self._requests.by_id(one.state.request_id)
            if request is not None:
                self._take_request(request, one, handles[first : first + num_outputs], now)
            first += num_outputs
        self.stats.num_generation_tokens += len(handles)

    def _take_request(
        self, request: Request, step: RequestStep, handles: list[int], now: float
    ) -> None:
        if step.is_done:
            self._end(request, step.failure, now)
            return
        if request.output.max_num_seqs > 1:
            self._requests.spread(request, step.living(handles))
        if request.output.is_followed:
            self._ready[request.output.request_id] = self._processor.follow(request.output)

    def _recover(self, step: OpenStep) -> None:
        """Bring requests and scheduler together after a step that did not come to its end."""
        if not step.scheduled:
            return
        self._end_ignored(step.scheduled[0], _now())
        if step.scheduled[0].is_empty:
            return
        try:
            self._scheduler.abandon(step.scheduled[0].step_id)
        except StepError:
            # Closed already: the interrupt came after the scheduler had taken the tokens.
            self._take(step)

    def _end(self, request: Request | None, finish: Finish | None, now: float) -> None:
        """Make the last output of a request; one that has ended already may be named again."""
        if request is not None:
            output = self._processor.conclude(request.output, finish, now)
            self._ready[request.output.request_id] = output
            self._requests.discard(request)

    def _end_ignored(self, scheduled: SchedulerOutputs, now: float) -> None:
        for group, reason in scheduled.ignored_seq_groups:
            self._end(self._requests.by_group(group), Finish("ignored", reason), now)

    def _scored_rows(self, scheduled: SchedulerOutputs) -> list[ScoredRow]:
        """Rows of prompts whose log-probabilities somebody wants."""
        if not self._requests.has_scored:
            return []
        buffers = self._buffers
        seqs = buffers.row_handles[: scheduled.num_prefill_rows].tolist()
        return scored_rows(self._requests.by_seqs(seqs), buffers.query_start, buffers.positions)

    def _note_scheduled(self, scheduled: SchedulerOutputs) -> None:
        """Times and counts of a step about to run."""
        used = self.memory.num_gpu_blocks - self._scheduler.num_free_gpu_blocks
        self.stats.note_step(scheduled, used)
        if scheduled.num_prefill_rows:
            seqs = self._buffers.row_handles[: scheduled.num_prefill_rows].tolist()
            for living in self._requests.by_seqs(seqs):
                metrics = living.request.output.metrics
                if metrics.first_scheduled_time is None:
                    metrics.first_scheduled_time = _now()
        if self.seconds_since_stats >= _STATS_INTERVAL and logger.isEnabledFor(logging.INFO):
            logger.info("%s", self.stats_line())
        if logger.isEnabledFor(logging.DEBUG):
            num_waiting = self._scheduler.num_waiting
            logger.debug("%s, %d waiting", step_line(scheduled, used), num_waiting)

    def _note_endings(self, judged: JudgedStep) -> None:
        """Ask the scheduler about requests that it is about to forget."""
        for step in judged.requests:
            request = self._requests.by_id(step.state.request_id) if step.is_done else None
            if request is not None:
                self._note_scheduling(request)

    def _note_scheduling(self, request: Request) -> None:
        metrics = request.output.metrics
        seconds = self.stats.scheduler_seconds - request.scheduler_seconds
        counts = self._scheduler.preemptions_of(request.group)
        metrics.scheduler_time = seconds
        metrics.num_preemptions, metrics.num_recomputed_tokens = counts


def _did_nothing(scheduled: SchedulerOutputs) -> bool:
    return scheduled.is_empty and not scheduled.preempted

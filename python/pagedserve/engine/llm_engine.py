"""``LLMEngine``: requests in, one step at a time, outputs out.

Owns the scheduler, the executor and the requests.  Invariants:

1. The scheduler's groups and ``_requests`` name the same requests whenever no method runs, also
   after an exception or an interrupt in the middle of one.
2. A step that failed leaves every request as it was; the next step does the same work again.
   Where the failure came after the scheduler had taken the tokens, the requests have them too.
3. An output is returned once, by the step that made it or, if that one failed, by the next.

Costs: outside the executor a step is three border calls and about two microseconds a row.
"""

import logging
import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from pagedserve._core import CacheConfig, Scheduler, SchedulerConfig, SchedulerOutputs
from pagedserve.engine.admission import Admission, CheckedRequest
from pagedserve.engine.args import EngineArgs
from pagedserve.engine.memory import MemoryPlan, default_kv_cache_bytes, free_bytes, plan_memory
from pagedserve.engine.requests import Request, RequestTable, RowSource
from pagedserve.errors import InvariantError, RequestError, StepError
from pagedserve.executor.executor import Executor
from pagedserve.inputs import ParsedPrompt, Prompt, parse_prompt
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.output.processor import JudgedStep, OutputProcessor, OutputState
from pagedserve.output.stop import Finish, StopRule
from pagedserve.outputs import RequestMetrics, RequestOutput
from pagedserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MIN_DEFAULT_BATCHED_TOKENS = 2048
_ABORTED = Finish("abort")

# The engine's clock; the scheduler sees no other.
_now = time.monotonic


@dataclass(slots=True)
class EngineStats:
    """Sums over the life of an engine.

    Attributes:
        num_steps: Steps that ran the model.
        num_prompt_tokens: Prompt tokens of the requests taken up.
        num_generation_tokens: New tokens.
        peak_used_blocks: KV blocks in use at the fullest moment.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    peak_used_blocks: int = 0


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
        config = SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens
            or max(_MIN_DEFAULT_BATCHED_TOKENS, loaded.max_model_len, args.max_num_seqs),
            max_model_len=loaded.max_model_len,
        )
        self.memory = self._plan_memory(args)
        logger.info("%s", self.memory.describe())
        cache = CacheConfig(block_size=args.block_size, num_gpu_blocks=self.memory.num_gpu_blocks)
        self._scheduler = Scheduler(config, cache)
        self._executor.init_cache(
            num_gpu_blocks=cache.num_gpu_blocks,
            num_cpu_blocks=cache.num_cpu_blocks,
            block_size=cache.block_size,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_rows=config.max_num_seqs,
            max_model_len=config.max_model_len,
        )
        self._admission = Admission(
            tokenizer=loaded.tokenizer,
            vocab_size=loaded.vocab_size,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            cache=cache,
        )
        self._buffers = self._executor.buffers
        self._token_start = np.arange(args.max_num_seqs + 1, dtype=np.int32)
        self._processor = OutputProcessor(Detokenizer(loaded.tokenizer))
        self._seed = args.seed
        self._num_added = 0
        self._requests = RequestTable()
        self._ready: dict[str, RequestOutput] = {}
        self.stats = EngineStats()

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
        return self._admission.max_model_len

    @property
    def num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def has_unfinished_requests(self) -> bool:
        """Whether another ``step`` is wanted."""
        return len(self._requests) > 0 or len(self._ready) > 0

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
            final_only: Leave out the outputs before the last; spares their text.

        Raises:
            RequestError: A request that cannot be run; nothing was taken up.
        """
        self._check_id(request_id)
        if not isinstance(prompt, CheckedRequest):
            params = sampling_params or SamplingParams()
            prompt = self.check_request(parse_prompt(prompt, "the prompt"), params)
        output = self._open_output(request_id, prompt, final_only=final_only)
        rows = RowSource(
            prompt.params,
            banned_at_first=output.rule.banned_at_first,
            key=self._random_key(prompt.params),
        )
        token_ids = np.array(prompt.prompt.token_ids, dtype=np.int32)
        arrival = output.metrics.arrival_time
        handles: list[tuple[int, int]] = []
        try:
            _call_into(
                handles, partial(self._scheduler.add_seq_group, token_ids, arrival_time=arrival)
            )
            self._requests.add(Request(*handles[0], output, rows))
        except BaseException:
            for group, _ in handles:
                self._scheduler.abort(group)
                self._discard(request_id)
            raise
        self._num_added += 1
        self.stats.num_prompt_tokens += len(token_ids)

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
        scheduled: list[SchedulerOutputs] = []
        judged: list[JudgedStep] = []
        try:
            _call_into(scheduled, partial(self._scheduler.schedule, started))
            self._end_ignored(scheduled[0], started)
            if not scheduled[0].is_empty:
                self._run(scheduled[0], judged)
        except BaseException:
            self._recover(scheduled, judged)
            raise
        if len(self._requests) and not self._ready and _did_nothing(scheduled[0]):
            raise InvariantError(
                f"the scheduler has nothing to do though {len(self._requests)} requests wait"
            )
        outputs, self._ready = list(self._ready.values()), {}
        return outputs

    def _open_output(
        self, request_id: str, checked: CheckedRequest, *, final_only: bool
    ) -> OutputState:
        prompt = checked.prompt
        rule = StopRule.from_params(
            checked.params,
            eos_token_ids=self._eos_token_ids,
            max_new_tokens=self.max_model_len - len(prompt.token_ids),
        )
        return OutputState(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            rule=rule,
            metrics=RequestMetrics(_now()),
            text_stream=None if final_only else self._processor.open_stream(),
        )

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

    def _random_key(self, params: SamplingParams) -> tuple[int, ...]:
        """Names a request's random numbers; the first number keeps the two kinds apart."""
        if params.seed is None:
            return (1, self._seed, self._num_added)
        return (0, params.seed)

    def _plan_memory(self, args: EngineArgs) -> MemoryPlan:
        return plan_memory(
            block_bytes=self._executor.kv_bytes_per_block(args.block_size),
            block_size=args.block_size,
            weight_bytes=self._executor.loaded.weight_bytes,
            free_bytes=free_bytes(self._executor.loaded.device),
            default_bytes=default_kv_cache_bytes(self._executor.loaded.device),
            num_gpu_blocks=args.num_gpu_blocks,
            kv_cache_memory=args.kv_cache_memory,
            max_model_len=args.max_model_len,
        )

    def _run(self, scheduled: SchedulerOutputs, judged: list[JudgedStep]) -> None:
        """Execute one step and take its tokens; ``judged`` keeps them for ``_recover``."""
        buffers = self._buffers
        self._scheduler.prepare_inputs(buffers.core)
        self._note_scheduled(scheduled)
        parent_rows = buffers.sample_rows[: scheduled.num_samples]
        requests = self._requests.by_seqs(buffers.row_handles[parent_rows].tolist())
        rows = [one.rows.row(len(one.output.token_ids)) for one in requests]
        tokens = self._executor.execute(scheduled, rows)
        step = self._processor.judge([one.output for one in requests], tokens)
        judged.append(step)
        self._scheduler.update(
            scheduled.step_id,
            parent_rows,
            self._token_start[: len(rows) + 1],
            tokens,
            step.finish_flags,
        )
        self._take(step)

    def _take(self, step: JudgedStep) -> None:
        """Record an updated step and make its outputs; may be called again for the same step."""
        now = _now()
        self._processor.apply(step, now)
        for state, finish in zip(step.states, step.finishes, strict=True):
            if finish is not None:
                self._end(self._requests.by_id(state.request_id), finish, now)
            elif state.text_stream is not None:
                self._ready[state.request_id] = self._processor.follow(state)
        self.stats.num_generation_tokens += len(step.tokens)

    def _recover(self, scheduled: list[SchedulerOutputs], judged: list[JudgedStep]) -> None:
        """Bring requests and scheduler together after a step that did not come to its end."""
        if not scheduled:
            return
        self._end_ignored(scheduled[0], _now())
        if scheduled[0].is_empty:
            return
        try:
            self._scheduler.abandon(scheduled[0].step_id)
        except StepError:
            # Closed already: the interrupt came after the scheduler had taken the tokens.
            self._take(judged[0])

    def _end(self, request: Request | None, finish: Finish, now: float) -> None:
        """Make the last output of a request; one that has ended already may be named again."""
        if request is not None:
            output = self._processor.conclude(request.output, finish, now)
            self._ready[request.output.request_id] = output
            self._requests.discard(request)

    def _end_ignored(self, scheduled: SchedulerOutputs, now: float) -> None:
        for group, reason in scheduled.ignored_seq_groups:
            self._end(self._requests.by_group(group), Finish("ignored", reason), now)

    def _note_scheduled(self, scheduled: SchedulerOutputs) -> None:
        """Times and counts of a step about to run."""
        self.stats.num_steps += 1
        used = self._admission.cache.num_gpu_blocks - self._scheduler.num_free_gpu_blocks
        self.stats.peak_used_blocks = max(self.stats.peak_used_blocks, used)
        # Prompts come first, and a request with one sequence has one row.
        num_prompts = scheduled.num_prefill_groups
        if num_prompts:
            now = _now()
            seqs = self._buffers.row_handles[:num_prompts].tolist()
            for request in self._requests.by_seqs(seqs):
                metrics = request.output.metrics
                if metrics.first_scheduled_time is None:
                    metrics.first_scheduled_time = now
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "step %d: %d prompts, %d rows, %d tokens, %d blocks used, %d waiting",
                scheduled.step_id,
                num_prompts,
                scheduled.num_rows,
                scheduled.num_batched_tokens,
                used,
                self._scheduler.num_waiting,
            )


def _did_nothing(scheduled: SchedulerOutputs) -> bool:
    return scheduled.is_empty and not scheduled.preempted


def _call_into(results: list[T], call: Callable[[], T]) -> None:
    """Call and keep the result in one: no interrupt can come between the two.

    Python looks for signals after each call that its own code makes; here the only such call is
    ``extend``, which returns when the result is in the list.  ``call`` must be a ``partial`` of
    something not written in Python.
    """
    results.extend(map(operator.call, (call,)))

"""``LLMEngine``: takes requests, runs one step at a time and returns outputs.

Owns the scheduler, the executor and the requests; ``EngineLoop`` runs the steps.  Invariants:

1. The scheduler's groups and ``_requests`` contain the same requests whenever no method runs, also
   after an exception or an interrupt in one; but a request that has ended may keep its group while
   a step that was launched before its end runs.
2. An output is returned once, by the step that produced it or, if that one failed, by the next.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, Unpack

import numpy as np

from pagedserve._core import Scheduler
from pagedserve.config import EngineArgs
from pagedserve.engine.adapters import AdapterTable
from pagedserve.engine.build import build, load
from pagedserve.engine.drafting import drafter_of
from pagedserve.engine.guard import EngineGuard, ModelOwner, exclusive
from pagedserve.engine.input_processor import InputProcessor
from pagedserve.engine.loop import EngineLoop
from pagedserve.engine.processors import create_processors, load_processors
from pagedserve.engine.request import Request, RequestTable, request_ids
from pagedserve.engine.stats import EngineSnapshot, EngineStats, StatsLine, cache_config
from pagedserve.errors import EngineDeadError, InvariantError
from pagedserve.executor.protocol import Executor, ModelInfo
from pagedserve.host_ops.threads import ThreadWaits
from pagedserve.inputs import Prompt
from pagedserve.inputs.prompts import match_params, parse_prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.models.load.hub import HubOptions
from pagedserve.models.load.model_properties import ModelConfig
from pagedserve.models.load.progress import loading
from pagedserve.models.tokenizer.loader import tokenizer_for_callers
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.sigint import sigint_deferred
from pagedserve.tokenizer import Tokenizer
from pagedserve.vllm_names import AbsentArguments, refuse_arguments

logger = logging.getLogger(__name__)

# Seconds between two statistics lines in the log.
_STATS_INTERVAL: Final = 10.0


class LLMEngine(ModelOwner):
    """A model, its KV cache and a scheduler, driven by the caller step by step.

    Methods run one at a time: a call during another, nested or by another thread, raises
    ``ConcurrentCallError``; after ``shutdown`` and in a forked child ``EngineDeadError``.

    Attributes:
        guard: Refuses such calls.
        input_processor: Checks and creates requests, without adding them.
        adapters: Adapters by id.
        model_executor: Runs the model.
        model_info: Properties of the model.
        stats: Counters over the engine's lifetime.
        memory: Memory plan: how the memory is used.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        executor: Executor | None = None,
        tokenizer: Tokenizer | None = None,
        choose: Callable[[EngineArgs, ModelInfo], EngineArgs] | None = None,
    ) -> None:
        """Load the model and allocate the KV cache.

        Args:
            args: Options of the engine.
            executor: Runs the model; None loads it into this process.
            tokenizer: Overrides the model's tokenizer.
            choose: Sets options that were not given, once the model is known.

        Raises:
            ConfigError: Arguments that contradict each other, the model or the available memory.
            ModelLoadError: The model cannot be found, read or run.
            EngineDeadError: This process was forked from one that has created an engine.
        """
        self.guard = EngineGuard()
        args = replace(args)  # checks the combination of the values again
        self._processors = load_processors(args.logits_processors)
        with loading(args.model, is_shown=args.use_tqdm_on_load):
            used, executor = load(args, tokenizer, executor)
        self._args = args
        if tokenizer is not None:
            self.tokenizer = tokenizer
        self.model_executor = executor
        try:
            self._set_up(args, used, executor, choose)
        except BaseException:
            executor.shutdown()
            raise

    def _set_up(
        self,
        args: EngineArgs,
        tokenizer: Tokenizer,
        executor: Executor,
        choose: Callable[[EngineArgs, ModelInfo], EngineArgs] | None,
    ) -> None:
        self.model_info: ModelInfo = executor.model_info
        args = args if choose is None else choose(args, self.model_info)
        built = build(args, executor)
        self.memory, self._scheduler, config = built.memory, built.scheduler, built.config
        self._cache_config = cache_config(args, built.cache, self.memory, self.model_info)
        processors = create_processors(self._processors, self.model_config)
        self.input_processor = InputProcessor.of(
            args, tokenizer, executor, self._scheduler, config, processors=processors
        )
        self.adapters = AdapterTable(
            executor, args.max_loras if args.enable_lora else 0, HubOptions.of_adapters(args)
        )
        self._requests = RequestTable()
        self._logs_decisions = args.decision_log is not None
        self.stats = EngineStats()
        self._log_line = StatsLine()
        self._logs_stats = not args.disable_log_stats
        on_gpu = self.model_info.device_type == "cuda"
        self._loop = EngineLoop(
            self._scheduler,
            executor,
            self._requests,
            self.stats,
            num_gpu_blocks=self.memory.num_gpu_blocks,
            max_num_seqs=config.max_num_seqs,
            async_scheduling=on_gpu if args.async_scheduling is None else args.async_scheduling,
            drafter=drafter_of(args, config, self.stats, tokenizer, LLMEngine),
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,  # noqa: ARG003  # no usage is reported
        stat_loggers: Sequence[object] | None = None,
        enable_multiprocessing: bool = False,  # noqa: ARG003  # the executor decides
    ) -> "LLMEngine":
        """Create an engine from ``engine_args``; the same as calling the class."""
        refuse_arguments({"stat_loggers": stat_loggers})
        return cls(engine_args)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, read-only: queues, free blocks, preemptions."""
        return self._scheduler

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        return self.input_processor.max_model_len

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model: that of transformers, imported here, where torch may run it."""
        return tokenizer_for_callers(self._args, self.input_processor.tokenizer)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer, as ``tokenizer``."""
        return self.tokenizer

    def get_vocab(self) -> dict[str, int]:
        """Return the model's token ids by token."""
        return self.input_processor.tokenizer.get_vocab()

    def get_model_config(self) -> ModelInfo:
        """Return properties of the model."""
        return self.model_info

    @cached_property
    def model_config(self) -> ModelConfig:
        """Properties of the model under vLLM's names."""
        info = self.model_info
        return ModelConfig(
            self._args,
            max_model_len=info.max_model_len,
            dtype=info.dtype,
            device_type=info.device_type,
        )

    def get_num_unfinished_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._requests)

    def has_unfinished_requests(self) -> bool:
        """Whether any request is unfinished, so that ``step`` must be called."""
        return len(self._requests) > 0 or len(self._loop.outputs) > 0

    def stats_line(self, line: StatsLine) -> str:
        """Format a statistics line: queues, KV cache, prefix hits, tokens/s.

        Args:
            line: State of the caller's line; its rates are since its last line.
        """
        return line.write(self.stats, self._scheduler)

    def snapshot(self, seconds_without_progress: float = 0.0) -> EngineSnapshot:
        """Return the current gauges and counters; thread-safe.

        Args:
            seconds_without_progress: Value of that field, measured by the caller.
        """
        return EngineSnapshot.of(
            self._scheduler,
            seconds_without_progress=seconds_without_progress,
            cache_config=self._cache_config,
            lora_usage=self.adapters.usage(self._requests),
            has_drafts=self.input_processor.args.num_drafts > 0,
            stats=self.stats,
            threads=ThreadWaits.now(),
        )

    def do_log_stats(self) -> None:
        """Write a line of statistics to the log."""
        logger.info("%s", self.stats_line(self._log_line))

    @exclusive
    def reset_prefix_cache(
        self,
        reset_running_requests: bool | None = False,  # noqa: ARG002  # a running request keeps its
        reset_connector: bool = False,  # noqa: ARG002  # blocks, and no connector exists
    ) -> bool:
        """Drop every cached prefix.

        Returns:
            Whether the cache was reset; False, without any change, while a request holds blocks.
            Without prefix caching it always is.
        """
        return self._scheduler.reset_prefix_cache()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        output_token_ids: Sequence[int] = (),
        **absent: Unpack[AbsentArguments],
    ) -> None:
        """Add a request; later steps generate its tokens.

        Args:
            request_id: Request id, unique among unfinished requests.
            prompt: Text or token ids.
            params: Sampling parameters, or pooling parameters; None is ``SamplingParams()``.  Beam
                search and ``best_of`` above ``n`` return only their last output.
            arrival_time: Seconds of the wall clock; None is now.
            lora_request: Adapter to use; its files are read now if necessary.
            priority: Priority; the lowest is served first, with ``scheduling_policy="priority"``.
            output_token_ids: Tokens generated by another engine; generation resumes after them with
                the tokens that would have followed there.
            **absent: Arguments of vLLM without effect here, such as ``trace_headers=None``.

        Raises:
            RequestError: The request cannot be run, and was not added.
        """
        refuse_arguments(absent)
        self.guard.check()
        self._requests.check_new(request_id)
        self.add(
            self.input_processor.process(
                request_id,
                parse_prompt(prompt, "the prompt"),
                params if isinstance(params, PoolingParams) else match_params(params, 1)[0],
                arrival_time=arrival_time,
                priority=priority,
                lora_request=lora_request,
                adapter=None if lora_request is None else self.adapters.load(lora_request),
                output_token_ids=output_token_ids,
            )
        )

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter into host memory before a request needs it.

        Returns:
            True.

        Raises:
            RequestError: The adapter is invalid; the message lists what is accepted.
        """
        self.adapters.load(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter; running requests keep it until they end.

        Returns:
            Whether the id was known.
        """
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Ids of the known adapters."""
        return self.adapters.ids

    @exclusive
    def add(self, request: Request) -> None:
        """Add a request created by ``input_processor``.

        Raises:
            RequestError: Another unfinished request has its id; it was not added.
        """
        self._requests.check_new(request.request_id)
        known = request.prompt_token_ids + request.sequences[0].token_ids
        token_ids = np.array(known, dtype=np.int32)
        branches = [np.array(branch.token_ids, dtype=np.int32) for branch in request.branches]
        request.start_seconds = self.stats.scheduler_seconds
        with sigint_deferred():
            group, first = self._scheduler.add_seq_group(
                token_ids,
                arrival_time=time.monotonic(),
                max_num_running_seqs=request.max_num_running_seqs,
                can_regrow=request.search is not None,
                priority=request.priority,
                adapter=0 if request.adapter is None else request.adapter.ordinal,
                salt=request.salt,
                num_encoder_tokens=0 if request.encoder is None else request.encoder.num_states,
                branches=branches,
                request_id=request.request_id,
            )
            handles = self._scheduler.seqs_of(group).tolist() if branches else [first]
            self._requests.add(request, group, handles)
            self.stats.num_prompt_tokens += len(token_ids) + sum(map(len, branches))

    @exclusive
    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """Abort requests; their blocks are free when this returns.

        Args:
            request_id: One id or several; ids of finished requests are ignored.

        Returns:
            The last output of each unfinished request, with its tokens so far and the finish reason
            "abort", or another reason if it ends in the current step.

        Raises:
            RequestError: The value is neither an id nor an iterable of ids.
        """
        ended = self._loop.abort(request_ids(request_id))
        self._flush_decision_log()
        return ended

    @exclusive
    def end_failed(self, error: Exception, *, all_requests: bool = False) -> list[RequestOutput]:
        """End the requests of the last failed step, or all if it had none.

        Args:
            error: Reason of the failure.
            all_requests: End all requests.

        Returns:
            Their last outputs, with the finish reason "error", and all other pending outputs.
        """
        return self._loop.end_failed(error, all_requests=all_requests)

    def step(self) -> list[RequestOutput]:
        """Schedule and run one step.

        Returns:
            Outputs of requests that ended, and of streamed requests that got a token.

        Raises:
            InvariantError: The scheduler returns no work though requests wait: a bug.
        """
        guard = self.guard
        caller = guard.begin()
        if guard.thread is not None:
            guard.refuse("step")
        guard.thread = caller
        try:  # no call follows the one below: an interrupt in one would lose the outputs
            self._step()
            outputs, self._loop.outputs = self._loop.outputs, []
            return outputs
        finally:
            guard.thread = None

    def _step(self) -> None:
        decisions = self._loop.step()
        did_nothing = decisions.is_empty and not decisions.preempted
        if len(self._requests) and not self._loop.outputs and did_nothing:
            waiting = len(self._requests)
            raise InvariantError(f"the scheduler has nothing to do though {waiting} requests wait")
        self._flush_decision_log()
        if self._logs_stats and self._log_line.age() >= _STATS_INTERVAL:
            self.do_log_stats()

    def _flush_decision_log(self) -> None:
        """Flush the log if no request is left; report once if it ended with an error."""
        if not self._logs_decisions:
            return
        if not len(self._requests):
            self._scheduler.flush_log()
        if (error := self._scheduler.log_error) is not None:
            self._logs_decisions = False
            logger.error("the decision log ends here, and requests continue: %s", error)

    @exclusive
    def restart(self) -> list[RequestOutput]:
        """Reload dead ranks (``ExecutorDeadError``); unfinished requests end with errors.

        Returns:
            Their last outputs, and all other pending outputs.
        """
        why = EngineDeadError("the engine was restarted")
        outputs = self._loop.end_failed(why, all_requests=True)
        self.model_executor.restart()
        if not self._scheduler.reset_prefix_cache():
            raise InvariantError("KV blocks are in use though every request has ended")
        return outputs

    def shutdown(self) -> None:
        """Shut down; see ``LLM.shutdown``.  Unfinished requests end without an output."""
        if not (self.guard.is_inherited or self.guard.is_shut_down):
            self._shut_down()

    @exclusive
    def _shut_down(self) -> None:
        self.guard.is_shut_down = True
        try:
            self._loop.close()
        finally:
            self.input_processor.grammars.end()
            self.model_executor.shutdown()

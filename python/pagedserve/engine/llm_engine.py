"""``LLMEngine``: requests in, one step at a time, outputs out.

Owns the scheduler, the executor and the requests; the steps are those of the ``EngineLoop``.
Invariants:

1. The scheduler's groups and ``_requests`` name the same requests whenever no method runs, also
   after an exception or an interrupt in the middle of one; but a request that has ended may have a
   group for as long as a step that was launched before anybody knew is under way.
2. An output is returned once, by the step that made it or, if that one failed, by the next.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

import pagedserve.checks as checks
from pagedserve._core import Scheduler
from pagedserve.config import EngineArgs
from pagedserve.engine.adapters import AdapterTable
from pagedserve.engine.build import build
from pagedserve.engine.drafting import drafter_of
from pagedserve.engine.input_processor import InputProcessor
from pagedserve.engine.loop import EngineLoop
from pagedserve.engine.request import Request, RequestTable
from pagedserve.engine.stats import EngineSnapshot, EngineStats, StatsLine, cache_config
from pagedserve.errors import EngineDeadError, InvariantError
from pagedserve.executor.protocol import Executor, ModelInfo
from pagedserve.inputs import Prompt, match_params, parse_prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.models.hub import HubOptions
from pagedserve.models.progress import loading
from pagedserve.models.tokenizer import load_tokenizer
from pagedserve.output.stop import Finish
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.sigint import sigint_deferred
from pagedserve.vllm_names import refuse_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ABORTED: Final = Finish("abort")
# Seconds between two lines of statistics in the log.
_STATS_INTERVAL: Final = 10.0


class LLMEngine:
    """A model, its KV cache and a scheduler, driven by the caller step by step.

    Not thread-safe: all calls come from one thread.

    Attributes:
        tokenizer: The model's.
        input_processor: Makes requests, checked and not yet taken up.
        adapters: Finds those that requests name.
        model_executor: Runs the model.
        model_info: What the model is.
        stats: Sums over the engine's life.
        memory: Where the memory went.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        executor: Executor | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        choose: Callable[[EngineArgs, ModelInfo], EngineArgs] | None = None,
    ) -> None:
        """Load the model and make the KV cache.

        Args:
            args: The user's.
            executor: Runs the model; None loads it into this process.
            tokenizer: Instead of the model's own.
            choose: Gives options that were left open a value, once the model is known.

        Raises:
            ConfigError: Arguments that contradict each other, the model or the memory.
            ModelLoadError: The model cannot be found, read or run.
        """
        with loading(args.model, is_shown=args.use_tqdm_on_load):
            # Before the weights: a model without a tokenizer is refused at once.
            self.tokenizer = tokenizer or load_tokenizer(args)
            if executor is None:
                from pagedserve.executor.choose import make_executor

                executor = make_executor(args)
        self.model_executor = executor
        try:
            self._set_up(args, executor, choose)
        except BaseException:
            executor.shutdown()
            raise

    def _set_up(
        self,
        args: EngineArgs,
        executor: Executor,
        choose: Callable[[EngineArgs, ModelInfo], EngineArgs] | None,
    ) -> None:
        self.model_info: ModelInfo = executor.model_info
        args = args if choose is None else choose(args, self.model_info)
        built = build(args, executor)
        self.memory, self._scheduler, config = built.memory, built.scheduler, built.config
        self._cache_config = cache_config(args, built.cache, self.memory, self.model_info)
        self._has_decision_log = args.decision_log is not None
        self.input_processor = InputProcessor.of(
            args, self.tokenizer, executor, self._scheduler, config
        )
        self.adapters = AdapterTable(
            executor, args.max_loras if args.enable_lora else 0, HubOptions.of_adapters(args)
        )
        self._requests = RequestTable()
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
            drafter=drafter_of(args, config, self.stats, self.tokenizer, LLMEngine),
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,  # noqa: ARG003  # nothing is reported to anybody
    ) -> "LLMEngine":
        """The engine that ``engine_args`` describe; the same as calling the class."""
        return cls(engine_args)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, to look at: queues, free blocks, preemptions."""
        return self._scheduler

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and output together."""
        return self.input_processor.max_model_len

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self.tokenizer

    def get_model_config(self) -> ModelInfo:
        """What the model is."""
        return self.model_info

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def has_unfinished_requests(self) -> bool:
        """Whether another ``step`` is wanted."""
        return len(self._requests) > 0 or len(self._loop.outputs) > 0

    def stats_line(self, line: StatsLine) -> str:
        """One line for people: queues, KV cache, prefix hits, tokens/s.

        Args:
            line: Of whoever asks: its rates are those since that one asked before.
        """
        return line.write(self.stats, self._scheduler, self.memory.num_gpu_blocks)

    def snapshot(self, seconds_without_progress: float = 0.0) -> EngineSnapshot:
        """Gauges and sums as they stand; any thread may ask.

        Args:
            seconds_without_progress: What the caller knows of it, to be put in.
        """
        return EngineSnapshot.of(
            self._scheduler,
            self.memory,
            seconds_without_progress=seconds_without_progress,
            cache_config=self._cache_config,
            lora_usage=self.adapters.usage(self._requests),
            has_drafts=self.input_processor.args.num_drafts > 0,
            stats=self.stats,
        )

    def do_log_stats(self) -> None:
        """Write a line of statistics to the log."""
        logger.info("%s", self.stats_line(self._log_line))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix.

        Returns:
            Whether it was done; False, and nothing is forgotten, while a request holds blocks.
            Without prefix caching there is nothing to forget, and it always is.
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
        **absent: None,
    ) -> None:
        """Take up a request; its first tokens come with later steps.

        Args:
            request_id: The caller's name for it, of no other unfinished request.
            prompt: Text or token ids.
            params: How to continue it, or to pool it; None is ``SamplingParams()``.  Beam searches,
                and requests for the best of several, give their last output alone.
            arrival_time: Seconds of the wall clock; None is now.
            lora_request: The adapter to answer with; its files are read here if need be.
            priority: Smaller goes first, with ``scheduling_policy="priority"``.
            output_token_ids: Tokens that another engine made of it: it goes on behind them as that
                one would have.
            **absent: ``trace_headers=None`` and its like, for the sake of vLLM's scripts.

        Raises:
            RequestError: A request that cannot be run; nothing was taken up.
        """
        refuse_arguments(absent)
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
        """Read an adapter into host memory before a request needs it.

        Returns:
            True.

        Raises:
            RequestError: What is wrong with it, and what is accepted.
        """
        self.adapters.load(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that have it end with it.

        Returns:
            Whether there was one of that number.
        """
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers that stand for an adapter."""
        return self.adapters.ids

    def add(self, request: Request) -> None:
        """Take up a request that ``input_processor`` made.

        Raises:
            RequestError: Its id is that of another unfinished request; nothing was taken up.
        """
        self._requests.check_new(request.request_id)
        known = request.prompt_token_ids + request.sequences[0].token_ids
        token_ids = np.array(known, dtype=np.int32)
        request.start_seconds = self.stats.scheduler_seconds
        with sigint_deferred():
            group, handle = self._scheduler.add_seq_group(
                token_ids,
                arrival_time=time.monotonic(),
                max_num_running_seqs=request.params.max_num_running_seqs,
                can_regrow=request.search is not None,
                priority=request.priority,
                adapter=0 if request.adapter is None else request.adapter.ordinal,
                salt=request.salt,
                num_encoder_tokens=0 if request.encoder is None else request.encoder.num_states,
                request_id=request.request_id,
            )
            self._requests.add(request, group, handle)
            self.stats.num_prompt_tokens += len(token_ids)

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now; their blocks are free when this returns.

        Args:
            request_id: One id or several; ids of requests that have ended are passed over.

        Returns:
            The last output of each that was unfinished, with what it had so far and the finish
            reason "abort"; its own reason where it ends in a step that is under way.

        Raises:
            RequestError: Something that is no id and no series of ids.
        """
        if not isinstance(request_id, Iterable):
            checks.refuse("request_id", request_id, "a string or a list of strings")
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        unfinished = {name for name in names if name in self._requests}
        # A step under way may be at work on their blocks, or bring their end.
        self._loop.drain()
        with sigint_deferred():
            for name in names:
                request = self._requests.by_id(name)
                if request is not None:
                    self._loop.end(request, _ABORTED, self._scheduler.abort(request.group))
            ended = [
                output
                for output in self._loop.outputs
                if output.finished and output.request_id in unfinished
            ]
            self._loop.outputs = [
                output for output in self._loop.outputs if output.request_id not in names
            ]
        self._flush_decision_log()
        return ended

    def end_failed(self, error: Exception, *, all_requests: bool = False) -> list[RequestOutput]:
        """Give up the requests of the step that failed last, or all where it held none.

        Args:
            error: Why it failed.
            all_requests: All, whatever it held.

        Returns:
            Their last outputs, with the finish reason "error", and what else nobody has fetched.
        """
        finish = Finish("error", f"its steps failed: {type(error).__name__}: {error}")
        with sigint_deferred():
            failed = [] if all_requests else self._loop.failed
            for request in failed or list(self._requests):
                if self._requests.by_id(request.request_id) is request:
                    self._loop.end(request, finish, self._scheduler.abort(request.group))
        outputs, self._loop.outputs = self._loop.outputs, []
        return outputs

    def step(self) -> list[RequestOutput]:
        """Schedule and run one step.

        Returns:
            Requests that ended, and those that got a token and whose callers follow them.

        Raises:
            InvariantError: The scheduler has nothing to do though requests wait: a bug.
        """
        decisions = self._loop.step()
        did_nothing = decisions.is_empty and not decisions.preempted
        if len(self._requests) and not self._loop.outputs and did_nothing:
            waiting = len(self._requests)
            raise InvariantError(f"the scheduler has nothing to do though {waiting} requests wait")
        self._flush_decision_log()
        if self._logs_stats and self._log_line.age() >= _STATS_INTERVAL:
            self.do_log_stats()
        outputs, self._loop.outputs = self._loop.outputs, []
        return outputs

    def restart(self) -> list[RequestOutput]:
        """Load anew what died (``ExecutorDeadError``); requests that had not ended end with errors.

        Returns:
            Their last outputs, and what else nobody has fetched.
        """
        outputs = self.end_failed(EngineDeadError("the engine was restarted"), all_requests=True)
        self.model_executor.restart()
        self._scheduler.reset_prefix_cache()
        return outputs

    def shutdown(self) -> None:
        """End the processes that compute with this one, if there are any."""
        self.model_executor.shutdown()

    def _flush_decision_log(self) -> None:
        """Bring the log to its file if no request is left, and say once that it ended."""
        if not self._has_decision_log:
            return
        if not len(self._requests):
            self._scheduler.flush_log()
        if (error := self._scheduler.log_error) is not None:
            self._has_decision_log = False
            logger.error("the decision log ends here, and requests go on: %s", error)

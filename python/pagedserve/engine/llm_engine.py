"""``LLMEngine``: requests in, one step at a time, outputs out.

Owns the scheduler, the executor and the requests; the steps are those of the ``StepLoop``.
Invariants:

1. The scheduler's groups and ``_requests`` name the same requests whenever no method runs, also
   after an exception or an interrupt in the middle of one; but a request that has ended may have a
   group for as long as a step that was launched before anybody knew is under way.
2. An output is returned once, by the step that made it or, if that one failed, by the next.
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Final

from transformers import PreTrainedTokenizerBase

import pagedserve.checks as checks
from pagedserve._core import Scheduler, SchedulerOutputs
from pagedserve.config import EngineArgs
from pagedserve.engine.admission import Admission, CheckedRequest
from pagedserve.engine.loop import StepLoop, now
from pagedserve.engine.requests import Request, RequestTable
from pagedserve.engine.setup import cache_config, memory_plan, scheduler_config
from pagedserve.engine.stats import EngineStats, StatsLine
from pagedserve.engine.step import call_into
from pagedserve.errors import InvariantError, RequestError
from pagedserve.executor.executor import Executor
from pagedserve.inputs import ParsedPrompt, Prompt, match_params, parse_prompt
from pagedserve.models.tokenizer import load_tokenizer
from pagedserve.output.processor import OutputProcessor
from pagedserve.output.stop import Finish
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_ABORTED: Final = Finish("abort")
# Seconds between two lines of statistics.
_STATS_INTERVAL: Final = 10.0


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
        # Before the weights: a model without a tokenizer is refused at once.
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            args.model, args.load_format, args.tokenizer
        )
        self._executor = Executor(args)
        loaded = self._executor.loaded
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
        self._processor = OutputProcessor(self.tokenizer)
        self._admission = Admission(
            tokenizer=self.tokenizer,
            vocab_size=loaded.vocab_size,
            eos_token_ids=tuple(loaded.eos_token_ids),
            scheduler=config,
            prompt_refusal=self._scheduler.prompt_refusal,
            processor=self._processor,
            seed=args.seed,
        )
        self._num_added = 0
        self._requests = RequestTable()
        self.stats = EngineStats()
        self._stats_line = StatsLine(now())
        on_gpu = loaded.device.type == "cuda"
        self._loop = StepLoop(
            self._scheduler,
            self._executor,
            self._processor,
            self._requests,
            self.stats,
            num_gpu_blocks=cache.num_gpu_blocks,
            max_num_seqs=config.max_num_seqs,
            goes_ahead=on_gpu if args.async_scheduling is None else args.async_scheduling,
        )

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
        return len(self._requests) > 0 or len(self._loop.ready) > 0

    def describe_backends(self) -> str:
        """One line for people: who computes attention and linear layers."""
        return self._executor.loaded.describe_backends()

    def stats_line(self) -> str:
        """One line for people: queues, KV cache, prefix hits, tokens/s since the last line."""
        num_blocks = self.memory.num_gpu_blocks
        return self._stats_line.write(self.stats, self._scheduler, num_blocks, now())

    @property
    def seconds_since_stats(self) -> float:
        """Seconds since the last line of statistics."""
        return self._stats_line.age(now())

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix.

        Returns:
            Whether it was done; False, and nothing is forgotten, while a request holds blocks.
            Without prefix caching there is nothing to forget, and it always is.
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
            (params,) = match_params(sampling_params, 1)
            prompt = self.check_request(parse_prompt(prompt, "the prompt"), params)
        new = self._admission.open(
            request_id,
            prompt,
            number=self._num_added,
            arrival_time=now(),
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
            reason "abort"; its own reason where it ends in a step that is under way.

        Raises:
            RequestError: Something that is no id and no series of ids.
        """
        if not isinstance(request_id, Iterable):
            checks.refuse("request_id", request_id, "a string or a list of strings")
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        unfinished = {one for one in names if one in self._requests}
        # A step under way may be at work on their blocks, or bring their end.
        self._loop.settle()
        outputs = []
        for one in names:
            ready = self._loop.ready.pop(one, None)
            request = self._requests.by_id(one)
            if request is not None:
                self._loop.note_scheduling(request)
                self._scheduler.abort(request.group)
                self._requests.discard(request)
                outputs.append(self._processor.conclude(request.output, _ABORTED, now()))
            elif ready is not None and one in unfinished:
                outputs.append(ready)
        return outputs

    def step(self) -> list[RequestOutput]:
        """Schedule and run one step.

        Returns:
            Requests that ended, and those that got a token and whose callers follow them.

        Raises:
            InvariantError: The scheduler has nothing to do though requests wait: a bug.
        """
        decisions = self._loop.step()
        if len(self._requests) and not self._loop.ready and _did_nothing(decisions):
            raise InvariantError(
                f"the scheduler has nothing to do though {len(self._requests)} requests wait"
            )
        if self.seconds_since_stats >= _STATS_INTERVAL and logger.isEnabledFor(logging.INFO):
            logger.info("%s", self.stats_line())
        outputs, self._loop.ready = list(self._loop.ready.values()), {}
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


def _did_nothing(scheduled: SchedulerOutputs) -> bool:
    return scheduled.is_empty and not scheduled.preempted

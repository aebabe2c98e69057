"""``AsyncLLMEngine``: an engine for event loops.

Owns the streams of requests.  Requests are checked and tokenised in a worker thread, then the
engine's thread takes them up between two steps.  Each step wakes an event loop once, whatever the
number of its streams.  Invariants:

1. A stream whose reader leaves before the last output aborts its request: closed, cancelled, or
   collected as garbage.
2. A reader that does not read holds at most one output, into which later ones are merged.
3. When the engine ends, every stream learns why.

Costs: a step that brings outputs is one callback in each event loop, and about a microsecond a
stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from pagedserve.config import EngineArgs
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.engine.request import Request
from pagedserve.engine.stats import EngineSnapshot
from pagedserve.engine.stream import Stream, call_in, deliver, set_answer
from pagedserve.engine.thread import EngineThread
from pagedserve.errors import EngineDeadError, EngineStalledError, RequestError
from pagedserve.executor.protocol import Adapter, ModelInfo
from pagedserve.inputs import Prompt, match_params, parse_prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import PoolingRequestOutput, RequestOutput
from pagedserve.pooling.vectors import pooling_output
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.vllm_names import refuse_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

# Seconds without the end of a step after which an engine with requests counts as stalled.
STALL_TIMEOUT: Final = 60.0


class AsyncLLMEngine:
    """An ``LLMEngine`` in a thread of its own, for any event loops (``EngineClient``)."""

    closing_seconds = 2.0

    def __init__(
        self, make_engine: Callable[[], LLMEngine], *, stall_timeout: float = STALL_TIMEOUT
    ) -> None:
        """Begin to make an engine; ``wait_until_ready`` says when it is there.

        Args:
            make_engine: Makes it, in the engine's thread.
            stall_timeout: Seconds without the end of a step after which an engine with requests
                counts as stalled.
        """
        self._stall_timeout = stall_timeout
        self._dead_error: BaseException | None = None
        self._streams: dict[str, Stream] = {}
        # One worker: tokenizers are not made to be changed by several threads.
        self._input_worker = ThreadPoolExecutor(1, thread_name_prefix="pagedserve-input")
        # Its own: who names no adapter waits for no file.
        self._adapter_worker = ThreadPoolExecutor(1, thread_name_prefix="pagedserve-adapter")
        self._thread = EngineThread(
            make_engine, on_outputs=self._hand_out, on_end=self._end_all_streams
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        engine_config: None = None,
        start_engine_loop: bool = True,
        usage_context: object = None,  # noqa: ARG003  # nothing is reported to anybody
        **absent: None,
    ) -> Self:
        """Load a model and begin to run steps.

        Args:
            engine_args: Everything that decides how the engine is built.
            engine_config: None, as of vLLM.
            start_engine_loop: True: the engine has a thread of its own.
            usage_context: Of vLLM; says nothing here.
            **absent: ``stat_loggers=None`` and its like, for the sake of vLLM's scripts.

        Raises:
            ConfigError: Arguments that contradict each other, the model or the memory.
            ModelLoadError: The model cannot be found, read or run.
        """
        if not start_engine_loop:
            raise RequestError("start_engine_loop is False; the engine always has its thread")
        refuse_arguments({"engine_config": engine_config, **absent})
        engine = cls(partial(LLMEngine, engine_args))
        engine.wait_until_ready()
        return engine

    def wait_until_ready(self) -> None:
        """Wait until requests are taken.

        Raises:
            BaseException: What kept the engine from being made.
        """
        self._thread.is_ready.wait()
        if self._dead_error is not None and self._thread.engine is None:
            raise self._dead_error

    @property
    def is_loading(self) -> bool:
        """Whether the engine is still being made."""
        return not self._thread.is_ready.is_set()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: loaded, not dead, not shut down."""
        return self._thread.engine is not None and self._dead_error is None

    @property
    def is_stopped(self) -> bool:
        """Whether the engine takes no requests any more."""
        return self._dead_error is not None

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        error = self._dead_error  # of this very type where it was shut down
        return error is not None and type(error) is not EngineDeadError

    @property
    def dead_error(self) -> BaseException:
        """Why the engine has died, or that it runs no more."""
        error = self._dead_error or EngineDeadError("the engine runs")
        if isinstance(error, EngineDeadError):
            return error
        died = EngineDeadError(f"the engine has died: {type(error).__name__}")
        died.__cause__ = error
        return died

    async def generate(  # noqa: PLR0917  # in vLLM's order
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: None = None,
        prompt_adapter_request: None = None,
        priority: int = 0,
        *,
        arrival_time: float | None = None,
        output_token_ids: Sequence[int] = (),
        choice: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; see ``EngineClient.generate``.

        Args:
            prompt: Text or token ids.
            sampling_params: How to continue it, where ``output_kind`` says what comes; or how to
                pool it.
            request_id: Of no other unfinished request.
            lora_request: The adapter to answer with; its files are read beside the steps.
            trace_headers: None.
            prompt_adapter_request: None.
            priority: Smaller goes first, where the scheduler's policy asks for it.
            arrival_time: Seconds of the wall clock; None is now.
            output_token_ids: Tokens that another engine made of it, behind which it goes on.
            choice: Which of its ``n`` texts they are of there; here ``n`` is 1.

        Yields:
            Outputs up to the last.  Who leaves before it aborts the request.

        Raises:
            RequestError: A request that cannot be run; from the first ``anext``.
            EngineDeadError: The engine has died or is shut down.
        """
        refuse_arguments(
            {"trace_headers": trace_headers, "prompt_adapter_request": prompt_adapter_request}
        )
        if self._dead_error is not None:
            raise self.dead_error
        loop = asyncio.get_running_loop()
        if request_id in self._streams:
            raise RequestError(f"request_id is {request_id!r}, that of an unfinished request")
        stream = self._streams[request_id] = Stream(loop)
        is_finished, is_sent = False, False
        try:
            adapter = None if lora_request is None else await self._load(lora_request)
            check = partial(
                self._checked,
                request_id,
                prompt,
                sampling_params,
                arrival_time=arrival_time,
                priority=priority,
                lora_request=lora_request,
                adapter=adapter,
                output_token_ids=output_token_ids,
                choice=choice,
            )
            request = stream.request = await loop.run_in_executor(self._input_worker, check)
            if self._dead_error is not None:
                raise self.dead_error
            self._thread.send(partial(self._take_up, request, stream))
            is_sent = True
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            del self._streams[request_id]
            if is_sent and not is_finished:
                self._thread.send(lambda engine: _without_outputs(engine, request_id))

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        **absent: None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Make one vector of a prompt, with a model that pools.

        Args:
            prompt: As of ``generate``.
            pooling_params: How to pool it.
            request_id: As of ``generate``.
            lora_request: None: adapters are for models that generate.
            priority: As of ``generate``.
            **absent: ``trace_headers=None`` and its like, for the sake of vLLM's scripts.

        Yields:
            The vector.

        Raises:
            RequestError: A request that cannot be run, or that was ended; from the ``anext``.
            EngineDeadError: The engine has died or is shut down.
        """
        refuse_arguments(absent)
        outputs = self.generate(prompt, pooling_params, request_id, lora_request, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield pooling_output(output, self._engine.model_info.pooling, pooling_params)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams get a last output with the finish reason "abort"."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        for name in names:
            if name in self._streams:  # it may not have been taken up yet
                self._streams[name].is_aborted = True
        self._thread.send(lambda engine: engine.abort_request(names))

    def has_begun(self, request_id: str) -> bool:
        """Whether a step has taken an unfinished request up."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.has_begun

    async def check_health(self) -> None:
        """Look whether the engine gets on; see ``EngineClient.check_health``.

        Raises:
            EngineDeadError: It has died or is shut down.
            EngineStalledError: Requests wait, and no step has ended for too long.
        """
        if self._dead_error is not None:
            raise self.dead_error
        self._engine.model_executor.check()
        seconds = self._thread.seconds_without_progress()
        if seconds > self._stall_timeout:
            raise EngineStalledError(f"no step has ended for {seconds:.0f} s")

    @property
    def max_num_seqs(self) -> int:
        """Sequences of a step."""
        return self._engine.input_processor.max_num_seqs

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter into host memory before a request needs it; True.

        Raises:
            RequestError: What is wrong with it, and what is accepted.
        """
        await self._load(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, with which running requests end; whether there was one."""
        return self._engine.adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """The numbers that stand for an adapter."""
        return self._engine.adapters.ids

    async def get_tokenizer(
        self,
        lora_request: LoRARequest | None = None,  # noqa: ARG002  # adapters have the model's
    ) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self._engine.tokenizer

    async def get_model_config(self) -> ModelInfo:
        """What the model is."""
        return self._engine.model_info

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing is forgotten, while a request runs."""
        return await self._ask(lambda engine: engine.reset_prefix_cache())

    async def do_log_stats(self) -> None:
        """Write a line of statistics to the log."""
        await self._ask(lambda engine: engine.do_log_stats())

    def snapshot(self) -> EngineSnapshot:
        """Counts and gauges of the engine as they stand."""
        return self._engine.snapshot(self._thread.seconds_without_progress())

    def shutdown(self) -> None:
        """Stop after the step under way; streams that have not ended end with "abort"."""
        self._thread.send(lambda engine: engine.abort_request(list(self._streams)))
        self._thread.stop()
        self._input_worker.shutdown(cancel_futures=True)
        self._adapter_worker.shutdown(cancel_futures=True)

    @property
    def _engine(self) -> LLMEngine:
        engine = self._thread.engine
        if engine is None:
            raise self._dead_error or EngineDeadError("the engine is still being made")
        return engine

    def _checked(
        self,
        request_id: str,
        prompt: Prompt,
        given: SamplingParams | PoolingParams | None,
        **more: Any,
    ) -> Request:
        params = given if isinstance(given, PoolingParams) else match_params(given, 1)[0]
        return self._engine.input_processor.process(
            request_id, parse_prompt(prompt, "the prompt"), params, **more
        )

    async def _load(self, lora_request: LoRARequest) -> Adapter:
        load = partial(self._engine.adapters.load, lora_request)
        return await asyncio.get_running_loop().run_in_executor(self._adapter_worker, load)

    async def _ask(self, question: Callable[[LLMEngine], T]) -> T:
        """Have something asked of the engine between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def ask(engine: LLMEngine) -> list[RequestOutput]:
            value = question(engine)
            call_in(loop, partial(set_answer, answer, value))
            return []

        self._thread.send(ask)
        while not answer.done():  # who asks while the engine ends is never answered
            if self._dead_error is not None:
                raise self.dead_error
            await asyncio.wait([answer], timeout=1)
        return answer.result()

    def _take_up(self, request: Request, stream: Stream, engine: LLMEngine) -> list[RequestOutput]:
        if self._streams.get(request.request_id) is stream:  # else its reader has left
            try:
                engine.add(request)
            except Exception as error:  # noqa: BLE001  # of this request alone
                call_in(stream.loop, partial(stream.fail, error))
            if stream.is_aborted:
                return engine.abort_request(request.request_id)
        return []

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        """Wake each event loop once for all its streams, in the engine's thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]] = {}
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, delivery in by_loop.items():
            call_in(loop, partial(deliver, delivery))

    def _end_all_streams(self, error: BaseException) -> None:
        self._dead_error = error
        for stream in list(self._streams.values()):
            call_in(stream.loop, partial(stream.fail, self.dead_error))


def _without_outputs(engine: LLMEngine, request_id: str) -> list[RequestOutput]:
    """End a request that nobody reads any more."""
    engine.abort_request(request_id)
    return []

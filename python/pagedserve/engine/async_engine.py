"""``AsyncLLMEngine``: an engine for event loops.

Owns the streams of requests.  Requests are checked and tokenized in worker threads, then the
engine's thread adds them between two steps.  Each step wakes an event loop once, whatever the
number of its streams.  Invariants:

1. A stream whose reader stops before the last output aborts its request: closed, cancelled,
   collected as garbage, or left in an event loop that was closed.
2. A slow reader holds at most one output, into which later ones are merged.
3. When the engine ends, every stream raises the reason.

Costs: a step with outputs is one callback in each event loop, and about a microsecond per stream.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Self, TypeVar, Unpack

from pagedserve.config import EngineArgs
from pagedserve.engine.guard import ModelOwner
from pagedserve.engine.lanes import SMALL_COST, GrammarLanes, Lanes, input_cost
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.engine.request import Request, checked_id, request_ids
from pagedserve.engine.row_sampler import OWN_DRAWS, DrawKey
from pagedserve.engine.stats import EngineSnapshot
from pagedserve.engine.stream import Reader, Stream, Streams, call_in, set_answer
from pagedserve.engine.thread import EngineThread
from pagedserve.errors import EngineDeadError, EngineStalledError, RequestError
from pagedserve.executor.protocol import Adapter, ModelInfo
from pagedserve.inputs import Prompt
from pagedserve.inputs.prompts import match_params, match_pooling_params, parse_prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.models.load.model_properties import ModelConfig
from pagedserve.output.pooling import pooling_output
from pagedserve.outputs import PoolingRequestOutput, RequestOutput
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams
from pagedserve.tokenizer import Tokenizer
from pagedserve.vllm_names import AbsentArguments, AbsentNamedArguments, refuse_arguments

T = TypeVar("T")

# Seconds without a completed step after which an engine with requests counts as stalled.
STALL_TIMEOUT: Final = 60.0


class AsyncLLMEngine(ModelOwner):
    """An ``LLMEngine`` in a separate thread, for any number of event loops (``EngineClient``)."""

    closing_seconds = 2.0

    def __init__(
        self, make_engine: Callable[[], LLMEngine], *, stall_timeout: float = STALL_TIMEOUT
    ) -> None:
        """Start to create an engine; ``wait_until_ready`` waits for it.

        Args:
            make_engine: Creates the engine, in the engine's thread.
            stall_timeout: Seconds without a completed step after which an engine with requests
                counts as stalled.
        """
        self._stall_timeout = stall_timeout
        self._dead_error: BaseException | None = None
        self._streams = Streams(lambda name: self._thread.post(partial(_without_outputs, name)))
        self._input_lanes, self._grammars = Lanes("pagedserve-input"), GrammarLanes()
        # Separate: requests without adapters do not wait for files.
        self._adapter_lanes = Lanes("pagedserve-adapter")
        self._thread = EngineThread(
            make_engine,
            on_outputs=self._streams.hand_out,
            on_look=self._streams.leave_closed,
            on_end=self._end_all_streams,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        engine_config: None = None,
        start_engine_loop: bool = True,
        usage_context: object = None,  # noqa: ARG003  # no usage is reported
        **absent: Unpack[AbsentArguments],
    ) -> Self:
        """Load a model and start to run steps.

        Args:
            engine_args: Options of the engine.
            engine_config: None, as in vLLM.
            start_engine_loop: True: the engine always has a separate thread.
            usage_context: Accepted from vLLM's scripts, without effect.
            **absent: Arguments of vLLM without effect here, such as ``stat_loggers=None``.

        Raises:
            ConfigError: Arguments that contradict each other, the model or the available memory.
            ModelLoadError: The model cannot be found, read or run.
        """
        if not start_engine_loop:
            raise RequestError("start_engine_loop is False; the engine always has its thread")
        refuse_arguments({"engine_config": engine_config, **absent})
        engine = cls(partial(LLMEngine, engine_args))
        engine.wait_until_ready()
        return engine

    def wait_until_ready(self) -> None:
        """Wait until requests are accepted.

        Raises:
            BaseException: Creating the engine failed.
        """
        self._thread.guard.check()
        self._thread.is_ready.wait()
        if self._dead_error is not None and self._thread.engine is None:
            raise self._dead_error

    @property
    def is_loading(self) -> bool:
        """Whether the engine is still being created."""
        return not self._thread.is_ready.is_set()

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted: loaded, not dead, not shut down."""
        return self._thread.engine is not None and self._dead_error is None

    @property
    def is_stopped(self) -> bool:
        """Whether the engine no longer accepts requests."""
        return self._dead_error is not None

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        error = self._dead_error  # exactly this type after a shutdown
        return error is not None and type(error) is not EngineDeadError

    @property
    def dead_error(self) -> BaseException:
        """Why the engine has died, or that it was shut down."""
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
        draws: DrawKey = OWN_DRAWS,
        **absent: Unpack[AbsentNamedArguments],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; see ``EngineClient.generate``.

        Args:
            prompt: Text or token ids.
            sampling_params: Sampling parameters, where ``output_kind`` selects the outputs; or
                pooling parameters.
            request_id: Request id, unique among unfinished requests.
            lora_request: Adapter to use; its files are read while steps run.
            trace_headers: None.
            prompt_adapter_request: None.
            priority: Priority; the lowest is served first, with ``scheduling_policy="priority"``.
            arrival_time: Seconds of the wall clock; None is now.
            output_token_ids: Tokens generated by another engine, after which generation resumes.
            draws: Selects its random numbers; by default those of its next request.
            **absent: Arguments of vLLM without effect here, such as ``data_parallel_rank=None``.

        Yields:
            Outputs up to the last.  Stopping the iteration before it aborts the request.

        Raises:
            RequestError: The request cannot be run; raised by the first ``anext``.
            EngineDeadError: The engine has died or is shut down.
        """
        refuse_arguments(
            {
                "trace_headers": trace_headers,
                "prompt_adapter_request": prompt_adapter_request,
                **absent,
            }
        )
        self._check()
        params = _checked_params(sampling_params)
        loop = asyncio.get_running_loop()
        if checked_id(request_id) in self._streams:
            raise RequestError(f"request_id is {request_id!r}, that of an unfinished request")
        stream = self._streams[request_id] = Stream(loop)
        reader = Reader(partial(self._streams.leave, request_id, stream))
        try:
            adapter = None if lora_request is None else await self._load(lora_request)
            turn = arrival_time or request_id  # shared by the prompts of one request
            await self._grammars.wait(params, self.engine.input_processor.grammars, turn)
            check = partial(
                self._checked,
                request_id,
                prompt,
                params,
                arrival_time=arrival_time,
                priority=priority,
                lora_request=lora_request,
                adapter=adapter,
                output_token_ids=output_token_ids,
                draws=draws,
            )
            cost = input_cost(prompt, params)
            request = stream.request = await self._input_lanes.run(check, cost=cost, group=turn)
            self._check()
            self._thread.send(partial(self._take_up, request, stream))
            while not stream.is_finished:
                output = await stream.get()
                stream.is_finished = output.finished
                yield output
        finally:
            reader.leave()

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        **absent: Unpack[AbsentArguments],
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Run a pooling request.

        Args:
            prompt: As in ``generate``.
            pooling_params: Pooling parameters.
            request_id: As in ``generate``.
            lora_request: None: adapters are for generative models.
            priority: As in ``generate``.
            **absent: Arguments of vLLM without effect here, such as ``trace_headers=None``.

        Yields:
            The output with the vector.

        Raises:
            RequestError: The request cannot be run, or was ended; raised by ``anext``.
            EngineDeadError: The engine has died or is shut down.
        """
        refuse_arguments(absent)
        (params,) = match_pooling_params(pooling_params, 1)
        outputs = self.generate(prompt, params, request_id, lora_request, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield pooling_output(output, self.engine.model_info.pooling, params)

    async def abort(
        self,
        request_id: str | Iterable[str],
        internal: bool = False,  # noqa: ARG002  # a request has one id
    ) -> None:
        """Abort requests; their streams get a last output with the finish reason "abort"."""
        names = request_ids(request_id)
        for name in names:
            if name in self._streams:  # it may not have been added to the engine yet
                self._streams[name].is_aborted = True
        self._thread.send(lambda engine: engine.abort_request(names))

    def has_begun(self, request_id: str) -> bool:
        """Whether a step has started an unfinished request."""
        stream = self._streams.get(request_id)
        return stream is not None and stream.has_begun

    async def check_health(self) -> None:
        """Check that the engine makes progress; see ``EngineClient.check_health``.

        Raises:
            EngineDeadError: It has died or is shut down.
            EngineStalledError: Requests wait, and no step has completed for too long.
        """
        self._check()
        self.engine.model_executor.check()
        seconds = self._thread.seconds_without_progress()
        if seconds > self._stall_timeout:
            raise EngineStalledError(f"no step has ended for {seconds:.0f} s")

    @property
    def max_num_seqs(self) -> int:
        """Maximum sequences per step."""
        return self.engine.input_processor.max_num_seqs

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter into host memory before a request needs it; return True.

        Raises:
            RequestError: The adapter is invalid; the message lists what is accepted.
            EngineDeadError: The engine has died or is shut down.
        """
        await self._load(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter; running requests keep it.  Return whether the id was known."""
        # In a thread: the files of another adapter may be read, which locks the table.
        return await asyncio.to_thread(self.engine.adapters.remove, lora_id)

    async def list_loras(self) -> set[int]:
        """Ids of the known adapters."""
        return self.engine.adapters.ids

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the engine's requests."""
        return self.engine.input_processor.tokenizer

    async def get_tokenizer(
        self,
        lora_request: LoRARequest | None = None,  # noqa: ARG002  # adapters share the model's
    ) -> Tokenizer:
        """Return the model's tokenizer, as `LLMEngine.tokenizer`."""
        return await asyncio.to_thread(self.engine.get_tokenizer)

    async def get_model_config(self) -> ModelInfo:
        """Return properties of the model."""
        return self.engine.model_info

    @property
    def model_config(self) -> ModelConfig:
        """Properties of the model under vLLM's names."""
        return self.engine.model_config

    async def reset_prefix_cache(
        self,
        reset_running_requests: bool | None = False,  # noqa: ARG002  # a running request keeps its
        reset_connector: bool = False,  # noqa: ARG002  # blocks, and no connector exists
    ) -> bool:
        """Drop every cached prefix; while a request runs, do nothing and return False."""
        return await self._ask(lambda engine: engine.reset_prefix_cache())

    async def do_log_stats(self) -> None:
        """Write a line of statistics to the log."""
        await self._ask(lambda engine: engine.do_log_stats())

    async def is_tracing_enabled(self) -> bool:
        """False: a server traces requests."""
        return False

    async def is_sleeping(self) -> bool:
        """False: an engine never sleeps."""
        return False

    def start_background_loop(self) -> None:
        """Do nothing: the engine runs steps once it is created."""

    def snapshot(self) -> EngineSnapshot:
        """Return the current counters and gauges of the engine."""
        return self.engine.snapshot(self._thread.seconds_without_progress())

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002  # without effect
        """Stop after the current step; streams end with "abort".  No effect in a forked child."""
        if self._thread.guard.is_inherited:
            return
        self._thread.send(lambda engine: engine.abort_request(list(self._streams)))
        self._thread.stop()
        self._input_lanes.shutdown()
        self._grammars.shutdown()
        self._adapter_lanes.shutdown()

    def abandon(self) -> None:
        """Do nothing: the engine ends with its process."""

    @property
    def engine(self) -> LLMEngine:
        """The engine in the thread, to read its properties; its steps belong to the thread."""
        engine = self._thread.engine
        if engine is None:
            raise self._dead_error or EngineDeadError("the engine is still being made")
        return engine

    def _checked(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        **more: Any,
    ) -> Request:
        parsed = parse_prompt(prompt, "the prompt")
        return self.engine.input_processor.process(request_id, parsed, params, **more)

    def _check(self) -> None:
        """Raise an error if the engine no longer accepts requests."""
        self._thread.guard.check()
        if self._dead_error is not None:
            raise self.dead_error

    async def _load(self, lora_request: LoRARequest) -> Adapter:
        self._check()
        adapters = self.engine.adapters
        # One that may be downloaded delays none that is known.
        is_known = getattr(lora_request, "lora_int_id", None) in adapters.ids
        cost = 0 if is_known else SMALL_COST + 1
        load = partial(adapters.load, lora_request)
        return await self._adapter_lanes.run(load, cost=cost, group=None)

    async def _ask(self, question: Callable[[LLMEngine], T]) -> T:
        """Call a function with the engine between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def ask(engine: LLMEngine) -> list[RequestOutput]:
            call_in(loop, partial(set_answer, answer, question(engine)))
            return []

        self._thread.send(ask)
        while not answer.done():  # a call is never answered once the engine has ended
            self._check()
            await asyncio.wait([answer], timeout=1)
        return answer.result()

    def _take_up(self, request: Request, stream: Stream, engine: LLMEngine) -> list[RequestOutput]:
        stream.is_taken = True
        if self._streams.get(request.request_id) is stream:  # else its reader has stopped
            try:
                engine.add(request)
            except Exception as error:  # noqa: BLE001  # it concerns this request only
                call_in(stream.loop, partial(stream.fail, error))
            if stream.is_aborted:
                return engine.abort_request(request.request_id)
        return []

    def _end_all_streams(self, error: BaseException) -> None:
        self._dead_error = error
        self._streams.fail(self.dead_error)


def _checked_params(given: Any) -> SamplingParams | PoolingParams:
    return given if isinstance(given, PoolingParams) else match_params(given, 1)[0]


def _without_outputs(request_id: str, engine: LLMEngine) -> list[RequestOutput]:
    """Abort a request without returning its outputs."""
    engine.abort_request(request_id)
    return []

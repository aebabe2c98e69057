"""``pagedserve serve``: a server from its start to its end.

It listens before the model is loaded, so that probes see it live (503, "loading").  SIGTERM or
SIGINT stop admission; running requests have ``shutdown_timeout`` seconds to end, then they are
aborted, and the process ends with 0.  While the model is being loaded, and at a second signal, it
ends with 0 at once.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from socket import socket
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import uvicorn

from pagedserve.chat import read_chat_template
from pagedserve.config import EngineArgs
from pagedserve.engine.async_engine import AsyncLLMEngine
from pagedserve.engine.client import ServedEngine
from pagedserve.engine.defaults import default_sampling_params, server_defaults
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.errors import ConfigError, extra_needed
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.adapters import ServedAdapters
from pagedserve.server.app import build_app
from pagedserve.server.context import Context
from pagedserve.server.limits import Admission
from pagedserve.server.listen import Listener, listen
from pagedserve.server.metrics import Metrics
from pagedserve.server.options import LoraModule, ServerArgs

if TYPE_CHECKING:
    from pagedserve.server.tracing import Tracer

logger = logging.getLogger(__name__)

# Seconds between two looks whether the engine lives, and whether requests have ended.
_LOOK: Final = 0.05
# Seconds that connections have to close once nothing runs.
_CLOSING: Final = 2


def serve(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    start: Callable[[], ServedEngine] | None = None,
) -> int:
    """Serve until a signal, or until the engine dies.

    Args:
        engine_args: Of the engine.
        server_args: Of the server.
        start: Begins to load the engine somewhere else than in this process.

    Returns:
        The exit status: 0 after a signal, 1 if the engine has died.

    Raises:
        ConfigError: Arguments that contradict each other, the model or the memory, or an address
            that cannot be listened at.
        ModelLoadError: The model cannot be found, read or run.
        ImportError: An option needs packages that are not there.
    """
    # What needs no model is looked at before anything is loaded.
    if server_args.lora_modules and not engine_args.enable_lora:
        raise ConfigError("lora_modules is given without enable_lora; give both")
    chat_template = read_chat_template(server_args.chat_template)
    tracer = make_tracer(server_args.otlp_traces_endpoint)
    listener = listen(server_args)
    default_params: Future[SamplingParams] = Future()

    def make_engine() -> LLMEngine:
        default_params.set_result(default_sampling_params(engine_args))
        return LLMEngine(engine_args, choose=server_defaults)

    client: ServedEngine
    if start is None:
        client = AsyncLLMEngine(make_engine, stall_timeout=server_args.stall_timeout)
    else:
        client = start()
        default_params.set_result(default_sampling_params(engine_args))
    names = server_args.served_model_name or (engine_args.model,)
    admission = Admission(
        client, server_args.max_num_queued_reqs, server_args.max_num_queued_tokens
    )
    context = Context(
        client=client,
        args=server_args,
        names=names,
        default_params=default_params,
        admission=admission,
        metrics=Metrics(client, names[0], admission),
        adapters=ServedAdapters(client, names),
        tracer=tracer,
        chat_template=chat_template,
    )
    server = Server(context, client, listener)
    server.run()
    # Nothing can interrupt a load, nor a step that does not end.
    ending = threading.Thread(target=client.shutdown, daemon=True)
    if not (client.is_loading or server.force_exit):
        ending.start()
        ending.join(client.closing_seconds)
    if client.is_loading or server.force_exit or ending.is_alive():
        _leave()
    if server.failure is not None:
        raise server.failure
    return 1 if client.errored else 0


def make_tracer(endpoint: str | None) -> "Tracer | None":
    """What makes spans of requests, where there is somebody to send them to.

    Raises:
        ImportError: The packages are not there.
    """
    if endpoint is None:
        return None
    with extra_needed("--otlp-traces-endpoint", "otel"):
        from pagedserve.server.tracing import Tracer
    return Tracer(endpoint)


def _leave() -> NoReturn:
    """End the process beside the engine's thread."""
    logging.shutdown()
    os._exit(0)


class Server(uvicorn.Server):
    """uvicorn, with our way of starting and ending.

    Attributes:
        failure: What kept the engine from being made.
    """

    def __init__(self, context: Context, client: ServedEngine, listener: Listener) -> None:
        """Prepare to serve."""
        tls = listener.tls
        super().__init__(
            uvicorn.Config(
                build_app(context),
                log_config=None,  # its records look as all others
                log_level=context.args.uvicorn_log_level,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_CLOSING,
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )
        self.failure: BaseException | None = None
        self._context = context
        self._client = client
        self._listener = listener
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, sockets: list[socket] | None = None) -> None:
        """Serve to the end."""
        super().run(sockets or [self._listener.socket])

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Answer, and load the model meanwhile."""
        await super().startup(sockets)
        logger.info("listening at %s", self._listener.address)
        self._start(self._load())

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Close what is open, unless nobody waits for that."""
        if not self.force_exit:
            await super().shutdown(sockets)
            if self._context.tracer is not None:
                await asyncio.to_thread(self._context.tracer.shutdown)
        gc.unfreeze()  # extensions look at the end whether their objects are gone

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; the second time end at once."""
        del frame
        if self._context.is_draining:
            self.should_exit = self.force_exit = True
            return
        self._context.is_draining = True
        name = signal.Signals(sig).name
        logger.info("%s: no more requests are taken", name)
        self._start(self._drain())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        while self._client.is_loading:  # noqa: ASYNC110  # as below
            await asyncio.sleep(_LOOK)
        try:
            self._client.wait_until_ready()
            await self._open()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  # a panic of the core too; ``serve`` raises it
            self.failure = error
            self.should_exit = True
            return
        while not self._client.errored:  # noqa: ASYNC110  # the engine's thread knows no loop
            await asyncio.sleep(_LOOK)
        logger.error("the engine has died, and the server ends")
        self.should_exit = True

    async def _open(self) -> None:
        """Take requests: the model says what can be run together."""
        context, client = self._context, self._client
        model = await client.get_model_config()
        context.max_model_len = model.max_model_len
        for text in context.args.lora_modules:
            await context.adapters.load(LoraModule.parse(text))
        context.admission.max_num_seqs = client.max_num_seqs
        sys.setswitchinterval(0.0005)  # an event loop that wants to run waits for no whole slice
        # What is there by now stays; the collector, and every step with it, need not walk over it.
        gc.collect()
        gc.freeze()
        logger.info("%s", model.backends)
        logger.info("serving %s", ", ".join([*context.names, *context.adapters.names]))

    async def _drain(self) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._context.args.shutdown_timeout
        while self._context.num_open and clock() < deadline:  # noqa: ASYNC110  # for seconds
            await asyncio.sleep(_LOOK)
        deadline = clock() + _CLOSING
        while self._context.num_open and clock() < deadline:
            for running in list(self._context.jobs.values()):
                await self._context.abort(running)
            await asyncio.sleep(_LOOK)
        self.should_exit = True

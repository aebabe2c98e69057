"""A server's life: it loads the model after its start, and drains at its end.

It listens before the model is loaded, so that probes see it live (503, "loading").  SIGTERM or
SIGINT stop admission; running requests have ``shutdown_timeout`` seconds to end, then they are
aborted, and the process exits with 0.  While the model is being loaded, and at a second signal, it
exits with 0 at once.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from socket import socket
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import uvicorn

from pagedserve.engine.client import ServedEngine
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.app import build_app
from pagedserve.server.batches.service import BatchService
from pagedserve.server.collector import IdleCollector
from pagedserve.server.context import Context, make_context
from pagedserve.server.http.connection import BoundedProtocol, default_max_connections
from pagedserve.server.http.errors import ServerError
from pagedserve.server.http.listen import Listener
from pagedserve.server.options import ServerArgs
from pagedserve.server.prepare import Prepared

if TYPE_CHECKING:
    from pagedserve.server.http.tracing import Tracer

logger = logging.getLogger(__name__)

# Seconds between checks of the engine, and of requests while draining.
_LOOK: Final = 0.05
# Seconds between checks of an engine that is being loaded.
_LOADING_LOOK: Final = 0.01
# Seconds that connections have to close once nothing runs.
_CLOSING: Final = 2
# Seconds that an idle connection stays open: clients and proxies that reuse one close theirs first,
# most after 5 to 60 s, since a request on a connection that the server closes is lost.
_KEEP_ALIVE: Final = 75


def run(
    client: ServedEngine,
    names: tuple[str, ...],
    args: ServerArgs,
    prepared: Prepared,
    *,
    root: str | None,
    default_params: Future[SamplingParams],
    tracer: "Tracer | None",
) -> int:
    """Serve until a signal, or until the engine dies.

    Args:
        client: The engine, which may be loading.
        names: Names of the model.
        args: Options of the server.
        prepared: The socket, and files read for the server.
        root: Hub id of the model; None for files of this machine.
        default_params: Default sampling parameters, known once the engine is ready.
        tracer: Tracer of requests; None without traces.

    Returns:
        The exit status: 0 after a signal, 1 if the engine has died.

    Raises:
        BaseException: Creating the engine failed.
    """
    context = make_context(
        client,
        names,
        args,
        root=root,
        default_params=default_params,
        tracer=tracer,
        chat_template=prepared.chat_template,
        calibration=prepared.calibration,
    )
    server = Server(context, client, prepared.listener)
    server.run()
    # Loading cannot be interrupted, nor can a step that hangs.
    is_abandoned = client.is_loading or server.force_exit
    end = client.abandon if is_abandoned else client.shutdown
    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(_CLOSING if is_abandoned else client.closing_seconds)
    if is_abandoned or ending.is_alive():
        _leave()
    if server.failure is not None:
        raise server.failure
    return 1 if client.errored else 0


def _leave() -> NoReturn:
    """Exit the process without waiting for the engine's thread."""
    logging.shutdown()
    os._exit(0)


class Server(uvicorn.Server):
    """A uvicorn server that loads the model after its start, and drains at its end.

    Attributes:
        failure: Error of loading the engine.
    """

    def __init__(self, context: Context, client: ServedEngine, listener: Listener) -> None:
        """Prepare to serve.

        Raises:
            ConfigError: The directory of batches cannot be used.
        """
        tls, args = listener.tls, context.args
        directory = args.batch_directory
        self._batches = None if directory is None else BatchService(context, Path(directory))
        protocol: Any = partial(
            BoundedProtocol,
            receive_timeout=args.receive_timeout,
            stall_timeout=args.stall_timeout,
            max_connections=args.max_connections or default_max_connections(),
        )
        super().__init__(
            uvicorn.Config(
                build_app(context, self._batches),
                http=protocol,
                ws="none",
                log_config=None,  # its records have the format of all others
                log_level=args.uvicorn_log_level,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_CLOSING,
                timeout_keep_alive=_KEEP_ALIVE,
                ssl_context_factory=None if tls is None else lambda *_: tls,
            )
        )
        self.failure: BaseException | None = None
        self._context = context
        self._client = client
        self._listener = listener
        self._collector = IdleCollector()
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, sockets: list[socket] | None = None) -> None:
        """Serve to the end."""
        super().run(sockets or [self._listener.socket])

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Accept connections, and load the model in the background."""
        await super().startup(sockets)
        logger.info("listening at %s", self._listener.address)
        self._start(self._load())

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Close all connections, unless a second signal ended the server."""
        await self._stop_batches()
        if not self.force_exit:
            await super().shutdown(sockets)
            if self._context.tracer is not None:
                await asyncio.to_thread(self._context.tracer.shutdown)
        self._collector.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        del frame
        if self._context.is_draining:
            self.should_exit = self.force_exit = True
            logging.getLogger("uvicorn.error").disabled = True  # connections are closed on purpose
            return
        self._context.is_draining = True
        name = signal.Signals(sig).name
        logger.info("%s received: draining, new requests are refused", name)
        self._start(self._drain())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        while self._client.is_loading:  # noqa: ASYNC110  # as below
            await asyncio.sleep(_LOADING_LOOK)
        try:
            self._client.wait_until_ready()
            await self._open()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  # a core panic too; ``serve`` raises it
            self.failure = error
            self.should_exit = True
            return
        while not self._client.errored:  # the engine's thread uses no event loop
            await asyncio.sleep(_LOOK)
            self._collector.look(is_idle=self._context.num_open == 0)
        logger.error("the engine died: the server shuts down")
        self.should_exit = True

    async def _open(self) -> None:
        """Accept requests, with the limits of the model."""
        context, client = self._context, self._client
        await context.open(client.max_num_seqs)
        self._collector.start()
        model = await client.get_model_config()
        logger.info("%s", model.backends)
        if model.pooling is None and context.text.is_generic:
            logger.info(
                "the chat template shows no tools: requests with tools get a description in the "
                "system message, and calls are held to it (--no-generic-tool-calls refuses them)"
            )
        if self._batches is not None:
            self._batches.start(client.max_num_seqs)
        logger.info("serving %s", ", ".join(context.all_names))

    async def _drain(self) -> None:
        await self._stop_batches()
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._context.args.shutdown_timeout
        while self._context.num_open and clock() < deadline:
            self._drop_unfinished()
            await asyncio.sleep(_LOOK)
        deadline = clock() + _CLOSING
        while self._context.num_open and clock() < deadline:
            for running in list(self._context.jobs.values()):
                await self._context.abort(running)
            await asyncio.sleep(_LOOK)
        self.should_exit = True

    async def _stop_batches(self) -> None:
        if self._batches is not None:
            await self._batches.stop()

    def _drop_unfinished(self) -> None:
        """Refuse requests that have not arrived completely."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedProtocol) and connection.is_receiving:
                connection.drop(ServerError(503, "the server is shutting down", retry_after=5))

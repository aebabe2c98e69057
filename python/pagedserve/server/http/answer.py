"""Responses of generation requests: whole ones, and streams of server-sent events.

A response starts with its first output, so a refused request has its own status code; a stream
starts with a keep-alive if its first output takes long, because clients and proxies wait some
minutes at most for headers.  Meanwhile the connection is watched: a client that disconnects cancels
the handler, and with it every request to the engine.  (Starlette watches only responses that it
streams.)

Costs: one ``send`` for all pending events, some 10 us of uvicorn and the socket.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pagedserve.server.http.apis import Api, error_response
from pagedserve.server.http.errors import ServerError, reported

# Seconds between two checks of a stream.
_PULSE_SECONDS: Final = 1.0


class Answer(Response):
    """Sends what ``events`` yields: chunks of a stream, or one text."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        streams: bool,
        media_type: str,
        stall_timeout: float,
        keep_alive_interval: float,
        headers: Callable[[], list[tuple[bytes, bytes]]],
        failure: Callable[[ServerError, Scope], bytes],
        on_end: Callable[[ServerError | None], None],
    ) -> None:
        """Prepare the response.

        Args:
            events: Chunks of the body, in order; may raise before and between them.
            streams: Whether the chunks are events of a stream; else there is one chunk.
            media_type: Content type of a single chunk.
            stall_timeout: Seconds after which a client that reads nothing is disconnected.
            keep_alive_interval: Seconds without events after which a stream sends its API's
                keep-alive; 0 for never.
            headers: Returns further headers, when the response starts.
            failure: Creates the event of an error after the start of a stream.
            on_end: Called at the end, with the error that was sent to the client, if any.
        """
        super().__init__()
        self._events = events
        self._media_type = media_type.encode()
        self._streams = streams
        self._stall_timeout = stall_timeout
        self._keep_alive_interval = keep_alive_interval
        self._more_headers = headers
        self._failure = failure
        self._on_end = on_end
        self._error: ServerError | None = None
        # Chunks of a stream: one more started than sent while the client does not read.
        self._num_begun = 0
        self._num_sent = 0
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, unless the client disconnects first."""
        work = asyncio.create_task(self._work(scope, send))
        leaving = asyncio.create_task(_until_disconnected(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            work.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await work
            finally:
                error, self._error = self._error, None  # its traceback refers to this object
                self._on_end(error)

    async def _work(self, scope: Scope, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            if self._streams:
                await self._stream(scope, send, events)
            else:
                await self._whole(scope, send, events)

    async def _whole(self, scope: Scope, send: Send, events: AsyncGenerator[bytes, None]) -> None:
        try:
            whole = await anext(events)
        except Exception as error:  # noqa: BLE001  # any error is sent to the client
            await self._refuse(error, scope, send)
            return
        await send(self._start(self._media_type, (b"content-length", str(len(whole)).encode())))
        sending = send({"type": "http.response.body", "body": whole})
        with contextlib.suppress(TimeoutError):  # a client that does not read is cut off
            await asyncio.wait_for(sending, self._stall_timeout)

    async def _stream(self, scope: Scope, send: Send, events: AsyncGenerator[bytes, None]) -> None:
        api: Api = scope["api"]
        work = asyncio.current_task()
        assert work is not None  # noqa: S101  # a coroutine runs in a task
        pulse = asyncio.create_task(self._pulse(scope, send, work))
        try:
            async for part in events:
                await self._send(scope, send, part)
            await self._send(scope, send, api.stream_end)
        except Exception as error:  # noqa: BLE001  # as above
            if not self._num_begun:
                pulse.cancel()
                await self._refuse(error, scope, send)
                return
            self._error = reported(error)
            await self._send(scope, send, self._failure(self._error, scope) + api.stream_end)
        finally:
            pulse.cancel()
        await send({"type": "http.response.body", "body": b""})

    def _start(self, content_type: bytes, header: tuple[bytes, bytes]) -> Message:
        """Status and headers of a response that is no error."""
        headers = [(b"content-type", content_type), header, *self._more_headers()]
        return {"type": "http.response.start", "status": 200, "headers": headers}

    async def _refuse(self, error: Exception, scope: Scope, send: Send) -> None:
        self._error = reported(error)
        await error_response(self._error, scope)(scope, _nothing, send)

    async def _send(self, scope: Scope, send: Send, body: bytes) -> None:
        """Send a chunk of a stream, and its status and headers before the first."""
        self._num_begun += 1
        is_first = self._num_begun == 1
        async with self._turn:  # the start is sent before a chunk of the other task
            if is_first:
                kind = scope["api"].stream_type
                await send(self._start(kind, (b"cache-control", b"no-cache")))
            await scope["send"]({"type": "http.response.body", "body": body, "more_body": True})
        self._num_sent += 1

    async def _pulse(self, scope: Scope, send: Send, work: "asyncio.Task[None]") -> None:
        """Send keep-alives, also before the first event; disconnect a client that does not read.

        Runs in a separate task that checks what was sent, so that a token costs no clock call.
        """
        clock = asyncio.get_running_loop().time
        seen, since = (0, 0), clock()
        while True:
            await asyncio.sleep(min(_PULSE_SECONDS, self._stall_timeout))
            if (now := (self._num_begun, self._num_sent)) != seen:
                seen, since = now, clock()
            elif self._num_sent < self._num_begun:
                if clock() - since > self._stall_timeout:
                    work.cancel()
            elif 0 < self._keep_alive_interval < clock() - since:
                await self._send(scope, send, scope["api"].keep_alive)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    return {"type": "http.disconnect"}

"""Answers that are made while an engine runs: whole ones, and streams of server-sent events.

An answer begins to be sent when its first output is there, so a refusal has its own status.  While
it is made, the connection is watched: a client that leaves cancels the work, and with it every
request to the engine.  (Starlette watches only what it streams itself.)

Costs: one ``send`` for all events that are there, some 10 us of uvicorn and the socket.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pagedserve.server.errors import ServerError, server_error

DONE: Final = b"data: [DONE]\n\n"
# Seconds of silence after which a stream says that it is alive.
KEEP_ALIVE_SECONDS: Final = 15.0
_KEEP_ALIVE: Final = b": keep-alive\n\n"


class Answer(Response):
    """Sends what ``events`` yields: parts of a stream, or one JSON text."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        streams: bool,
        stall_timeout: float,
        on_end: Callable[[ServerError | None], None] | None = None,
    ) -> None:
        """Prepare the answer.

        Args:
            events: The parts of the body, in order; may raise before and between them.
            streams: Whether the parts are events of a stream, or the one part is all.
            stall_timeout: Seconds for which a client may take nothing.
            on_end: Told when all is over, and of the error that the client was told of.
        """
        super().__init__()
        self._events = events
        self._streams = streams
        self._stall_timeout = stall_timeout
        self._on_end = on_end
        self._error: ServerError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, unless the client leaves first."""
        del scope
        work = asyncio.create_task(self._work(send))
        leaving = asyncio.create_task(_until_disconnected(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            if self._on_end is not None:
                self._on_end(self._error)

    async def _work(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:  # noqa: BLE001  # whatever it is, the client is told
                await self._refuse(send, server_error(error))
                return
            kind = b"text/event-stream; charset=utf-8" if self._streams else b"application/json"
            headers = [(b"content-type", kind)]
            if self._streams:
                headers.append((b"cache-control", b"no-cache"))
            else:
                headers.append((b"content-length", str(len(first)).encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if self._streams:
                await self._stream(send, first, events)
            else:
                await send({"type": "http.response.body", "body": first})

    async def _stream(self, send: Send, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        try:
            await self._send(send, first)
            upcoming = asyncio.ensure_future(anext(events))
            try:
                while True:
                    done, _ = await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_SECONDS)
                    if not done:
                        await self._send(send, _KEEP_ALIVE)
                        continue
                    await self._send(send, upcoming.result())
                    upcoming = asyncio.ensure_future(anext(events))
            finally:
                upcoming.cancel()
                with contextlib.suppress(BaseException):
                    await upcoming
        except StopAsyncIteration:
            pass
        except TimeoutError:
            return  # a client that takes nothing is let go
        except Exception as error:  # noqa: BLE001  # as above
            told = self._error = server_error(error)
            await self._send(send, f"data: {json.dumps(told.body())}\n\n".encode())
        await send({"type": "http.response.body", "body": DONE})

    async def _send(self, send: Send, body: bytes) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": True}
        async with asyncio.timeout(self._stall_timeout):
            await send(message)

    async def _refuse(self, send: Send, error: ServerError) -> None:
        self._error = error
        response = error.response()
        await response({"type": "http"}, _nothing, send)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    return {"type": "http.disconnect"}

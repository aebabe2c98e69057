"""HTTP connections: limits on the size and duration of incomplete requests.

uvicorn limits neither the bytes of a header nor the time that a request takes to arrive.  Here a
header has at most ``MAX_HEADER_BYTES`` and ``MAX_HEADERS`` lines (431), headers and each MiB of
bodies have a time limit (408), a body has at most ``MAX_CHUNKS`` chunks (413), and the number of
connections is limited (503).  A request that is refused here never reaches the application, and its
connection closes.  A client that does not read is disconnected: a transport that closes waits for
its unsent bytes.  An offer to change to another protocol is ignored, as HTTP permits.

Costs: a few comparisons per read from the socket and per header line; two timers per connection,
and one per request that does not arrive in one read.
"""

import asyncio
import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pagedserve.server.http.apis import OPENAI, Api
from pagedserve.server.http.errors import ServerError

if TYPE_CHECKING:
    from uvicorn._types import (
        ASGI3Application,
        ASGIReceiveCallable,
        ASGISendCallable,
        ASGISendEvent,
        Scope,
    )

# Maximum bytes of the request line with all header lines, and maximum number of lines.
MAX_HEADER_BYTES: Final = 64 << 10
MAX_HEADERS: Final = 256
# Maximum chunks of a body without Content-Length: each costs a call, however small it is.
MAX_CHUNKS: Final = 1 << 16
# The time limit of a body restarts after this many bytes: slow is not stalled.
PROGRESS_BYTES: Final = 1 << 20
# Bytes of a line besides name and value.
_LINE_BYTES: Final = len(b": \r\n")
# Descriptors reserved for files, and connections that are always accepted.
_KEPT_DESCRIPTORS: Final = 64
_FEWEST_CONNECTIONS: Final = 8
# Seconds during which a refused client's remaining bytes are discarded: closing with unread bytes
# resets the connection, and the client might not receive the response.
_LINGER: Final = 2.0
# Each connection takes some 20 KB.
_MOST_CONNECTIONS: Final = 10_000
_PHRASES: Final = {
    400: "Bad Request",
    408: "Request Timeout",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def default_max_connections() -> int:
    """Number of connections that the process has descriptors for, at most 10,000."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    kept = max(_KEPT_DESCRIPTORS, descriptors // 4)
    return min(_MOST_CONNECTIONS, max(_FEWEST_CONNECTIONS, descriptors - kept))


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on incomplete requests."""

    def __init__(
        self,
        *given: Any,
        receive_timeout: float,
        stall_timeout: float,
        max_connections: int,
        **named: Any,
    ) -> None:
        """Prepare for a connection.

        Args:
            given: Arguments of uvicorn.
            receive_timeout: Seconds that a header may take to arrive, and then each MiB of a body.
            stall_timeout: Seconds after which a client that reads nothing is disconnected.
            max_connections: Maximum number of open connections.
            named: Keyword arguments of uvicorn.
        """
        super().__init__(*given, **named)
        self._receive_timeout = receive_timeout
        self._stall_timeout = stall_timeout
        self._max_connections = max_connections
        self._in_header = True  # between requests too
        self._in_body = False
        self._is_refused = False
        self._num_fed = 0  # bytes since the start of an incomplete header
        self._num_header_bytes = 0
        self._num_chunks = 0
        self._num_body_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._num_unsent = 0  # bytes at the last look, unless the client has read since
        self._running: RequestResponseCycle | None = None  # pipelined ones wait for its end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first header, or refuse one connection too many."""
        super().connection_made(transport)
        self._look_for_stall()
        if len(self.connections) > self._max_connections:
            text = f"{self._max_connections} connections are open; no more are accepted"
            self._refuse(ServerError(503, text, retry_after=1))
            transport.close()  # frees its descriptor
        else:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, and the running request; uvicorn cancels the last that arrived."""
        super().connection_lost(exc)
        self._stop_deadline()
        if self._next_look is not None:
            self._next_look.cancel()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def resume_writing(self) -> None:
        """Continue the response: the client has read most of its unsent bytes."""
        super().resume_writing()
        self._num_unsent = 0

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, unless the request is refused."""
        if self._is_refused:
            return
        if self._in_header:
            # The parser joins a line that arrives in fragments: their number must be limited.
            self._num_fed += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except HttpParserError:
            if not self._is_refused:
                self._refuse(ServerError(400, "the request is not valid HTTP/1.1"))
        if not self._is_open():
            return
        if self._in_header and self._num_fed > MAX_HEADER_BYTES:
            self._refuse_header()
        elif self._deadline is None and (self._in_body or (self._in_header and self._num_fed)):
            self._start_deadline()

    def _parse(self, data: memoryview) -> None:
        """Feed the parser; if a header offers another protocol, then again without the offer.

        httptools ends such a request at its header.  Java's client offers HTTP/2 for every body.

        Raises:
            HttpParserError: It is not HTTP.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                if not self._is_offered:  # CONNECT
                    return
                data = data[upgrade.args[0] :]
                version = self.parser.get_http_version().encode()
                start = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)
                lines = [b"%b: %b" % line for line in self.headers if line[0] != b"upgrade"]
                self.parser = HttpRequestParser(self)
                self.parser.feed_data(b"\r\n".join([start, *lines, b"", b""]))
            else:
                return

    @property
    def _is_offered(self) -> bool:
        """Whether the header offers to change to another protocol."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        """Count the bytes of a header from its first."""
        if self._is_refused:
            return
        super().on_message_begin()
        self._num_header_bytes = self._num_chunks = self._num_body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        self._num_header_bytes += len(url)
        if self._num_header_bytes <= MAX_HEADER_BYTES:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a line of a header; lines of a trailer are ignored."""
        self._num_header_bytes += len(name) + len(value) + _LINE_BYTES
        if self._in_body:
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse_header()
        elif self._num_header_bytes <= MAX_HEADER_BYTES and len(self.headers) <= MAX_HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the application, unless its header is too large."""
        if self._is_refused:
            return
        if self._num_header_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_header()
            return
        if self._is_offered:
            return
        self._in_header, self._in_body, self._num_fed = False, True, 0
        self._stop_deadline()
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Count the chunks of a body without Content-Length."""
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS and not self._is_refused:
            text = f"the body has more than {MAX_CHUNKS} chunks; send larger ones"
            self._refuse(ServerError(413, text))

    def on_body(self, body: bytes) -> None:
        """Buffer a part of a body for the application, which limits how much it reads."""
        if self._is_refused:
            return
        super().on_body(body)
        before = self._num_body_bytes
        self._num_body_bytes += len(body)
        has_progressed = self._num_body_bytes // PROGRESS_BYTES > before // PROGRESS_BYTES
        if has_progressed and not self.cycle.response_started:  # else it is not read
            self._start_deadline()

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        if self._is_refused or self._is_offered:
            return
        super().on_message_complete()
        self._in_header, self._in_body = True, False
        self._stop_deadline()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: "ASGI3Application") -> None:
        self._running, self._num_unsent = cycle, 0
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if is_old else app)

    @property
    def is_receiving(self) -> bool:
        """Whether a request has started to arrive and is incomplete."""
        return self._in_body or self._num_fed > 0

    def drop(self, error: ServerError) -> None:
        """Refuse an incomplete request, and close the connection."""
        if self._is_open():
            self._refuse(error)

    def _is_open(self) -> bool:
        return not (self._is_refused or self.transport.is_closing())

    def _refuse_header(self) -> None:
        if not self._is_refused:
            text = (
                f"the header is too large; at most {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} "
                "lines are accepted"
            )
            self._refuse(ServerError(431, text))

    def _refuse(self, error: ServerError) -> None:
        """Respond instead of the application, if no response is being sent, and close."""
        self._is_refused = True
        self._stop_deadline()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None:
            is_next = True
        elif self._in_body and not self.pipeline:  # of the last cycle, which runs or has responded
            is_next = not cycle.response_started
        else:
            is_next = cycle.response_complete
        if is_next:
            self.transport.write(_written(error, self.scope or {}))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(_LINGER, self.transport.close)
        else:
            self.transport.close()

    def _look_for_stall(self) -> None:
        """Disconnect a client that has read nothing since the last look."""
        before, self._num_unsent = self._num_unsent, 0
        # Otherwise bytes may have been read, and as many written.
        is_writing = self._running is not None and not self._running.response_complete
        if self.transport.is_closing() or self.flow.write_paused or not is_writing:
            self._num_unsent = self.transport.get_write_buffer_size()
            if 0 < self._num_unsent == before:
                self.transport.abort()
                return
        self._next_look = self.loop.call_later(self._stall_timeout, self._look_for_stall)

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self._receive_timeout, self._end_of_time)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_of_time(self) -> None:
        """Refuse an incomplete request after its time limit; pending responses are sent first."""
        self._deadline = None
        cycle: RequestResponseCycle | None = self.cycle
        is_answering = cycle is not None and not cycle.response_complete and self._in_header
        if self.transport.is_closing():
            return
        if is_answering or self.pipeline:  # reading is paused: the client is not late
            self._start_deadline()
            return
        part = "body" if self._num_body_bytes < PROGRESS_BYTES else "next MiB of the body"
        what = part if self._in_body else "header"
        text = f"the {what} did not arrive within {self._receive_timeout:g} s"
        if self.is_receiving:
            self._refuse(ServerError(408, text))
        else:  # no request was started
            self.transport.close()


def _unchunked(cycle: RequestResponseCycle, app: "ASGI3Application") -> "ASGI3Application":
    """Wrap an application for a client of HTTP/1.0, which does not know chunks.

    A body without a Content-Length ends with the connection, which uvicorn closes.
    """

    async def run(scope: "Scope", receive: "ASGIReceiveCallable", send: "ASGISendCallable") -> None:
        has_length = True

        async def sends(message: "ASGISendEvent") -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = b"content-length" in dict(message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sends)

    return run


def _written(error: ServerError, scope: Mapping[str, Any]) -> bytes:
    """Serialize a response for a connection that is closed after it.

    Args:
        error: The error.
        scope: Scope of the request; without an API until its header is complete.
    """
    api: Api = scope.get("api", OPENAI)
    content = api.error(error, scope.get("request_id", ""))
    lines = [
        f"HTTP/1.1 {error.status} {_PHRASES[error.status]}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
        *(f"{name.lower()}: {value}" for name, value in error.headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content

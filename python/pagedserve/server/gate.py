"""The one layer around the routes: keys, request ids, the size of bodies, counts.

It is plain ASGI: Starlette's other kind costs tens of microseconds a token and hides that a client
has left.
"""

import hashlib
import hmac
import os
import time
import uuid
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedserve.server.context import Context
from pagedserve.server.errors import ServerError
from pagedserve.server.protocol import MAX_ID_CHARS
from pagedserve.server.request_log import CLIENT_GONE, log_http

# What needs no key, and has no line in the log: probes, scrapes and the page, which asks for one.
OPEN_PATHS: Final = frozenset({"/", "/health", "/ping", "/metrics", "/version"})


class Gate:
    """Lets requests in, and counts them when they have been answered."""

    def __init__(self, app: ASGIApp, context: Context) -> None:
        """Stand before an application."""
        self._app = app
        self._context = context
        self._max_body_bytes = context.args.max_body_bytes
        keys = context.args.api_key or tuple(filter(None, [os.environ.get("PAGEDSERVE_API_KEY")]))
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # as GET; uvicorn, whose scope it is, leaves the body out
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        named = headers.get(b"x-request-id", b"").decode("latin-1")
        is_name = 0 < len(named) <= MAX_ID_CHARS and named.isascii() and named.isprintable()
        request_id = named if is_name else uuid.uuid4().hex
        scope["request_id"] = request_id
        scope["status"] = CLIENT_GONE
        scope["send"] = send  # for parts of a stream: no layer from here on looks at them
        send = _noting(send, scope, (b"x-request-id", request_id.encode("latin-1")))
        # A proxy may leave the path under which it serves this server.
        path = scope["path"].removeprefix(self._context.args.root_path) or "/"
        started = time.monotonic()
        self._context.num_open += 1
        try:
            refusal = self._refusal(path, headers)
            if refusal is not None:
                await refusal.response()(scope, receive, send)
            else:
                await self._app(scope, _bounded(receive, self._max_body_bytes), send)
        finally:
            seconds = time.monotonic() - started
            scope["method"] = method  # what was asked is what is counted
            self._context.metrics.http.request_ended(scope, scope["status"], seconds)
            self._context.num_open -= 1
            is_wanted = self._context.args.enable_log_requests and path not in OPEN_PATHS
            if is_wanted and "is_logged" not in scope:
                log_http(scope, seconds)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ServerError | None:
        if self._keys and path not in OPEN_PATHS:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            given = _digest(key if scheme.lower() == b"bearer" else b"")
            # All keys are compared, so that time tells nothing.
            if not any([hmac.compare_digest(given, known) for known in self._keys]):  # noqa: C419
                return ServerError(401, "no valid API key: give Authorization: Bearer KEY")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return _too_large(self._max_body_bytes)
        return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _too_large(most: int) -> ServerError:
    return ServerError(413, f"the body is too large; at most {most} bytes are accepted")


def _noting(send: Send, scope: Scope, header: tuple[bytes, bytes]) -> Send:
    """Sends with a header more, and notes the status in the scope."""

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start":
            scope["status"] = message["status"]
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return sends


def _bounded(receive: Receive, most: int) -> Receive:
    """Receives no more than so many bytes of a body."""
    left = most

    async def receives() -> Message:
        nonlocal left
        message = await receive()
        if message["type"] == "http.request":
            left -= len(message.get("body", b""))
            if left < 0:
                raise _too_large(most)
        return message

    return receives

"""ASGI middleware around the routes: API keys, request ids, body limits and metrics.

It is plain ASGI: Starlette's other kind costs tens of microseconds per token and does not report
that a client has disconnected.
"""

import hashlib
import hmac
import os
import re
import time
import uuid
from collections.abc import Mapping
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedserve.server.context import Context
from pagedserve.server.http.apis import OPENAI, Api, error_response
from pagedserve.server.http.bounds import MAX_ID_CHARS, SMALL_BODY_BYTES
from pagedserve.server.http.errors import ServerError
from pagedserve.server.http.request_log import CLIENT_GONE, log_http
from pagedserve.server.http.turns import Turns

# Paths without API key and log line: probes, scrapes and the page, which prompts for a key.
OPEN_PATHS: Final = frozenset({"/", "/health", "/ping", "/metrics", "/version"})

# Codings that change a body; some clients name its charset in the header of codings.
_COMPRESSIONS: Final = re.compile(r"\b(gzip|deflate|br|zstd|compress)\b", re.IGNORECASE)
# Digits of a Content-Length; Python parses no number of more than some thousand.
_MAX_LENGTH_DIGITS: Final = 20


class Gate:
    """Middleware that checks requests, and counts them at their end."""

    def __init__(self, app: ASGIApp, context: Context, apis: Mapping[str, Api]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            context: Context of the server.
            apis: APIs by a path, which have the paths within it too; others are OpenAI's.
        """
        self._app = app
        self._turns = Turns()
        self._apis = apis
        self._context = context
        self._max_body_bytes = context.args.max_body_bytes
        self._max_open_bytes = context.args.max_open_body_bytes or 8 * self._max_body_bytes
        keys = context.args.api_key or tuple(filter(None, [os.environ.get("PAGEDSERVE_API_KEY")]))
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":  # handled as GET; uvicorn omits the body by its own scope
            scope = {**scope, "method": "GET"}
        headers = dict(scope["headers"])
        request_id = scope["request_id"] = _request_id(headers)
        scope["status"] = CLIENT_GONE
        scope["send"] = send  # for chunks of a stream, which later layers need not process
        # A proxy may strip the root path of this server.
        path = scope["path"].removeprefix(self._context.args.root_path) or "/"
        api = scope["api"] = self._api(path)
        _declare_json(scope, headers)
        id_headers = [(name, request_id.encode("latin-1")) for name in api.request_id_headers]
        send = _noting(send, scope, id_headers)
        started = time.monotonic()
        self._context.num_open += 1
        arriving = scope["arriving"] = _ArrivingBody(
            receive, self._context, self._max_body_bytes, self._max_open_bytes
        )
        keys = self._accepted(_given_keys(headers))
        scope["owner"] = keys[0] if keys else b""
        try:
            if path not in OPEN_PATHS:
                await self._turns.take()
            refusal = self._refusal(path, headers, keys)
            if refusal is not None:
                await error_response(refusal, scope)(scope, receive, send)
            else:
                await self._app(scope, arriving.receive, send)
        finally:
            arriving.release()
            seconds = time.monotonic() - started
            scope["method"] = method  # metrics count the original method
            self._context.metrics.http.request_ended(scope, scope["status"], seconds)
            self._context.num_open -= 1
            del scope["send"], scope["arriving"]  # they refer to the scope
            is_wanted = self._context.args.enable_log_requests and path not in OPEN_PATHS
            if is_wanted and "is_logged" not in scope:
                log_http(scope, seconds)

    def _api(self, path: str) -> Api:
        for root, api in self._apis.items():
            if path == root or path.startswith(f"{root}/"):
                return api
        return OPENAI

    def _accepted(self, keys: list[bytes]) -> list[bytes]:
        """Those of some digests of keys that give access; all where no key is required."""
        if not self._keys:
            return keys
        # All keys are compared, in constant time.
        return [key for key in keys if any([hmac.compare_digest(key, each) for each in self._keys])]  # noqa: C419

    def _refusal(
        self, path: str, headers: dict[bytes, bytes], keys: list[bytes]
    ) -> ServerError | None:
        if not keys and path not in OPEN_PATHS:
            text = "no valid API key: give Authorization: Bearer KEY, or X-API-Key: KEY"
            return ServerError(401, text, headers={"WWW-Authenticate": "Bearer"})
        encoding = headers.get(b"content-encoding", b"").decode("latin-1")
        if _COMPRESSIONS.search(encoding):
            return ServerError(415, f"the Content-Encoding is {encoding!r}; it must be identity")
        length = headers.get(b"content-length", b"0")
        is_number = length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS
        if not is_number or int(length) > self._max_body_bytes:
            return _too_large(self._max_body_bytes)
        return None


def _given_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """Digests of the API keys of a request, at least one: that of no key is of an empty one."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    given = [bearer if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
    return [_digest(key) for key in filter(None, given)] or [_digest(b"")]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _too_large(most: int) -> ServerError:
    return ServerError(413, f"the body is too large; at most {most} bytes are accepted")


def _noting(send: Send, scope: Scope, headers: list[tuple[bytes, bytes]]) -> Send:
    """Wrap ``send`` to add headers, and store the status in the scope."""

    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start":
            scope["status"] = message["status"]
            message["headers"] = [*message.get("headers", ()), *headers]
        await send(message)

    return sends


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """Id of a request: the one that it has, or a new one."""
    named = headers.get(b"x-request-id", b"").decode("latin-1")
    is_name = 0 < len(named) <= MAX_ID_CHARS and named.isascii() and named.isprintable()
    return named if is_name else uuid.uuid4().hex


def _declare_json(scope: Scope, headers: Mapping[bytes, bytes]) -> None:
    """Declare a body without a Content-Type as JSON, where the API does.

    A page of another origin could send such a body without being allowed to, but not without its
    Origin.
    """
    api: Api = scope["api"]
    if api.takes_untyped and not headers.keys() & {b"content-type", b"origin"}:
        scope["headers"] = [*scope["headers"], (b"content-type", b"application/json")]


class _ArrivingBody:
    """Receives a body within its limits, and counts it among the open ones."""

    __slots__ = ("_context", "_max_bytes", "_max_open_bytes", "_num_bytes", "_num_open", "_receive")

    def __init__(
        self, receive: Receive, context: Context, max_bytes: int, max_open_bytes: int
    ) -> None:
        self._receive = receive
        self._context = context
        self._max_bytes = max_bytes
        self._max_open_bytes = max_open_bytes
        self._num_bytes = 0
        self._num_open = 0  # counted in the context

    async def receive(self) -> Message:
        """Receive the next message of a request.

        Raises:
            ServerError: 413, the body is too large; 503, all open bodies together are.
        """
        message = await self._receive()
        if message["type"] == "http.request" and (body := message.get("body")):
            self._num_bytes += len(body)
            if self._num_bytes > self._max_bytes:
                raise _too_large(self._max_bytes)
            if self._num_bytes > SMALL_BODY_BYTES:
                self._count(self._num_bytes - SMALL_BODY_BYTES)
        return message

    def release(self) -> None:
        """Stop counting the body: it is parsed, or its request has ended."""
        self._context.num_open_body_bytes -= self._num_open
        self._num_open = 0

    def _count(self, num_open: int) -> None:
        context = self._context
        context.num_open_body_bytes += num_open - self._num_open
        self._num_open = num_open
        if context.num_open_body_bytes > self._max_open_bytes:
            text = (
                f"the bodies that are arriving have {context.num_open_body_bytes} bytes; at most "
                f"{self._max_open_bytes} are accepted"
            )
            raise ServerError(503, text, retry_after=1)

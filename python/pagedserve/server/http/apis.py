"""Formats that all responses of an API share: of errors, and of what frames a stream.

A request has the API of its path; ``Gate`` stores it as ``api`` in the scope.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response
from starlette.types import Scope

from pagedserve.server.http.errors import ServerError, scrubbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """An API that clients use.

    Attributes:
        error_body: Returns the content of an error's body, from the error and its request's id.
        error_event: Start of the event of an error in a stream, before its body.
        keep_alive: What a stream sends after a long silence.
        stream_end: What ends a stream, also one that failed.
        event_end: End of the event of an error.
        stream_type: Content type of a stream.
        request_id_headers: Headers of a response with the id of its request.
        takes_untyped: Whether a body without a Content-Type is JSON, unless a browser sends it.
    """

    error_body: Callable[[ServerError, str], object]
    error_event: bytes
    keep_alive: bytes
    stream_end: bytes
    event_end: bytes = b"\n\n"
    stream_type: bytes = b"text/event-stream; charset=utf-8"
    request_id_headers: tuple[bytes, ...] = (b"x-request-id",)
    takes_untyped: bool = False

    def error(self, error: ServerError, request_id: str) -> bytes:
        """JSON body of an error; lone surrogates become question marks."""
        body = self.error_body(error, request_id)
        return json.dumps(body, ensure_ascii=False).encode(errors="replace")


def _openai_error(error: ServerError, request_id: str) -> object:
    del request_id
    told = {
        "message": scrubbed(error.message),
        "type": error.kind,
        "param": error.param,
        "code": error.status,
    }
    return {"error": told}


OPENAI: Final = Api(
    error_body=_openai_error,
    error_event=b"data: ",
    keep_alive=b"\n\n",  # load generators take a comment for an event
    stream_end=b"data: [DONE]\n\n",
)


def error_response(error: ServerError, scope: Scope) -> Response:
    """The whole response of an error, in the format of its request's API."""
    api: Api = scope["api"]
    body = api.error(error, scope["request_id"])
    return Response(body, error.status, error.headers, media_type="application/json")


def error_event(error: ServerError, scope: Scope) -> bytes:
    """The event of an error in a stream, in the format of its request's API."""
    api: Api = scope["api"]
    return api.error_event + api.error(error, scope["request_id"]) + api.event_end


def typed_event(kind: str, **fields: object) -> str:
    """An event of a stream whose events have types."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

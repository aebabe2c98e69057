"""Formats that all responses of the Messages API share."""

from typing import Final

from pagedserve.server.http.apis import Api
from pagedserve.server.http.errors import ServerError, scrubbed

# Root of the API's paths.
ROOT: Final = "/v1/messages"

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Details of a refusal, by the field that it names: the package anthropic then continues a
# conversation without a thread.
_DETAILS: Final = {
    "thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
}
# Status codes from this one on are errors of the server.
_SERVER_FAILED: Final = 500


def _error_body(error: ServerError, request_id: str) -> object:
    other = "api_error" if error.status >= _SERVER_FAILED else "invalid_request_error"
    kind = _TYPES.get(error.status, other)
    shown: dict[str, object] = {"type": kind, "message": scrubbed(error.message)}
    if error.param in _DETAILS:
        shown["details"] = _DETAILS[error.param]
    return {"type": "error", "error": shown, "request_id": request_id}


MESSAGES: Final = Api(
    error_body=_error_body,
    error_event=b"event: error\ndata: ",
    keep_alive=b'event: ping\ndata: {"type": "ping"}\n\n',
    stream_end=b"",
    request_id_headers=(b"x-request-id", b"request-id"),
)

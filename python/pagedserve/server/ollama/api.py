"""Formats that all responses of Ollama's API share."""

from typing import Final

from pagedserve.server.http.apis import Api
from pagedserve.server.http.errors import ServerError, scrubbed

# Root of the API's paths.
ROOT: Final = "/api"
# Version of Ollama that has this API; clients compare it with the oldest that they accept.
VERSION: Final = "0.32.15"


def _error_body(error: ServerError, request_id: str) -> object:
    del request_id
    return {"error": scrubbed(error.message)}


OLLAMA: Final = Api(
    error_body=_error_body,
    error_event=b"",
    event_end=b"\n",
    keep_alive=b"",  # clients look for a first line that starts with "{", and parse every line
    stream_end=b"",
    stream_type=b"application/x-ndjson",
    takes_untyped=True,  # as by Ollama, and so by some of its clients
)

"""Errors as OpenAI's clients read them: ``{"error": {message, type, param, code}}``.

Messages show what a caller gave and what is accepted; never paths, addresses or tracebacks.
"""

import json
import logging
import re
import traceback
from collections.abc import Mapping
from typing import Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagedserve.errors import EngineDeadError, EngineStalledError, RequestError

logger = logging.getLogger(__name__)

_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
# The most that is said of bodies that are no such requests.
_MAX_PROBLEMS: Final = 10
_MAX_CHARS: Final = 1000
_PRIVATE: Final = re.compile(r"(/[\w.\-]+){2,}|0x[0-9a-fA-F]{6,}")


class ServerError(Exception):
    """A refusal with its status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Say why.

        Args:
            status: Of HTTP.
            message: For people.
            param: The field that is wrong.
            retry_after: Seconds after which another try makes sense.
            headers: Of the answer, further ones.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    @property
    def kind(self) -> str:
        """Its ``type``."""
        return _TYPES.get(self.status, "InternalServerError")

    def body(self) -> bytes:
        """The JSON that clients read; half characters of theirs are question marks."""
        error = {
            "message": scrubbed(self.message),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return json.dumps({"error": error}, ensure_ascii=False).encode(errors="replace")

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def scrubbed(message: str) -> str:
    """A message without paths and addresses, of bounded length."""
    return _PRIVATE.sub("...", message)[: _MAX_PROBLEMS * _MAX_CHARS]


def reported(error: BaseException) -> ServerError:
    """What a client is told of an error; one that nobody thought of is told to the log.

    Its message may repeat what a user wrote, so the log has its kind and where it was raised.
    """
    told = _known(error)
    if told is None:
        places = "".join(traceback.format_tb(error.__traceback__))
        logger.error("a request failed: %s\n%s", type(error).__name__, places)
    return told or server_error(error)


def server_error(error: BaseException) -> ServerError:
    """What a client is told of an error."""
    return _known(error) or ServerError(500, f"the server failed: {type(error).__name__}")


def _known(error: BaseException) -> ServerError | None:
    for known in (error, error.__cause__):  # a framework that read the body may have wrapped it
        if isinstance(known, ServerError):
            return known
    if isinstance(error, RequestError):
        return ServerError(400, str(error), param=error.param)
    if isinstance(error, RequestValidationError):
        return ServerError(400, _problems(error), param=_field(error))
    if isinstance(error, EngineDeadError | EngineStalledError):
        return ServerError(503, str(error))
    if isinstance(error, HTTPException):
        return ServerError(error.status_code, str(error.detail), headers=error.headers)
    return None


def _field(error: RequestValidationError) -> str | None:
    """The first field that is wrong; None where the body is none at all."""
    place = [part for part in error.errors()[0]["loc"] if part != "body"]
    return place[0] if place and isinstance(place[0], str) else None


def _problems(error: RequestValidationError) -> str:
    """What is wrong with a body, a line a field; what was given is not repeated at length."""
    problems = []
    for problem in error.errors()[:_MAX_PROBLEMS]:
        place = ".".join(str(part) for part in problem["loc"] if part != "body")
        problems.append(f"{place or 'the body'}: {problem['msg']}"[:_MAX_CHARS])
    return "; ".join(problems)

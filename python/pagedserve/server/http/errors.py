"""Errors that are reported to clients; ``Api`` has their format.

Messages contain the given value and what is accepted; never paths, addresses or tracebacks.
"""

import json
import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pagedserve.errors import (
    EngineDeadError,
    EngineStalledError,
    MissingPackageError,
    RequestError,
)

logger = logging.getLogger(__name__)

_TYPES: Final = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
# Maximum length of messages about invalid bodies.
_MAX_PROBLEMS: Final = 10
_MAX_CHARS: Final = 1000
_MAX_GIVEN: Final = 80
# What most messages of pydantic begin with.
_MUST: Final = "Input should be "
# A JSON pointer into the client's body is not a path, and is kept.
_PRIVATE: Final = re.compile(r"(#(?:/[^\s/]*)+)|(?:/[\w.\-]+){2,}|0x[0-9a-fA-F]{6,}")


def rename_fields(error: RequestError, names: Mapping[str, str]) -> None:
    """Name the fields of a request in an error, in the place of other names.

    Args:
        error: The error, which is changed.
        names: What to write instead of words and quoted values of its text.
    """
    text = str(error)
    for name, shown in names.items():
        text = re.sub(rf"(?<!\w){name}(?!\w)", shown, text, count=1)
    error.args = (text,)
    if error.param is not None and error.param in names:
        error.param = names[error.param].partition(".")[0]


class ServerError(Exception):
    """A refused request with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Create an error.

        Args:
            status: HTTP status.
            message: Human-readable message.
            param: Invalid field.
            retry_after: Seconds after which the client should retry.
            headers: Further headers of the response.
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
        """Kind of error, in OpenAI's terms."""
        return _TYPES.get(self.status, "InternalServerError")


class UnavailableError(ServerError):
    """A refusal because others run or wait, or the server starts or ends: it may be tried again."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        """Create an error of status 503; see ``ServerError``."""
        super().__init__(503, message, retry_after=retry_after)


def scrubbed(message: str) -> str:
    """Remove paths and addresses from a message, and bound its length."""
    return _PRIVATE.sub(lambda found: found[1] or "...", message)[: _MAX_PROBLEMS * _MAX_CHARS]


def reported(error: BaseException) -> ServerError:
    """Convert an error to a response, and log it if it is unexpected.

    The message may repeat a user's text, so the log has only its type and where it was raised.
    """
    told = _known(error)
    if told is None:
        places = "".join(traceback.format_tb(error.__traceback__))
        logger.error("a request failed: %s\n%s", type(error).__name__, places)
    return told or server_error(error)


def server_error(error: BaseException) -> ServerError:
    """Convert an error to a response."""
    return _known(error) or ServerError(500, f"the server failed: {type(error).__name__}")


def _known(error: BaseException) -> ServerError | None:
    for known in (error, error.__cause__):  # FastAPI may have wrapped it while reading the body
        if isinstance(known, ServerError):
            return known
    if isinstance(error, RequestError):
        return ServerError(400, str(error), param=error.param)
    if isinstance(error, RequestValidationError):
        # Their positions begin with the part of the request: body, query or path.
        found = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
        message, param = problems(found)
        return ServerError(400, message, param=param)
    if isinstance(error, MissingPackageError | EngineDeadError | EngineStalledError):
        return ServerError(501 if isinstance(error, MissingPackageError) else 503, str(error))
    if isinstance(error, HTTPException):
        return ServerError(error.status_code, str(error.detail), headers=error.headers)
    return None


def problems(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Describe validation errors, and return the first invalid field; None for the whole body.

    One sentence per field; values that were given are shortened.
    """
    found = [_problem(problem)[:_MAX_CHARS] for problem in errors[:_MAX_PROBLEMS]]
    first = next(iter(errors[0]["loc"]), None)
    return "; ".join(found), first if isinstance(first, str) else None


def _problem(problem: Mapping[str, Any]) -> str:
    """Describe a validation error of pydantic or FastAPI: what was given, and what is accepted."""
    place = ".".join(map(str, problem["loc"]))
    message = problem["msg"]
    if problem["type"] == "json_invalid":
        return f"the body is not JSON: {problem['ctx']['error']} at character {place}"
    if problem["type"] == "missing":
        return f"{place or 'the body'} is missing; it is required"
    if problem["type"] == "union_tag_not_found":
        return f"{place}.type is missing or no string; it is required"
    if problem["type"] == "union_tag_invalid":
        tag, tags = problem["ctx"]["tag"], problem["ctx"]["expected_tags"]
        return f"{place}.type is {tag!r:.300}; accepted are {tags}"
    if problem["type"] == "model_type":  # the message names a class of this package
        message = f"{_MUST}an object"
    if not message.startswith(_MUST):
        return f"{place or 'the body'}: {message}"
    accepted = message.removeprefix(_MUST).partition(", unable to ")[0]
    return f"{place or 'the body'} is {_shown(problem['input'])}; it must be {accepted}"


def _shown(given: object) -> str:
    """A value as JSON, shortened; of a list or an object only what it is."""
    if isinstance(given, list | Mapping):
        return "a list" if isinstance(given, list) else "an object"
    cut = given[:_MAX_GIVEN] if isinstance(given, str) else given
    return json.dumps(cut, ensure_ascii=False, default=str)[: _MAX_GIVEN + 2]

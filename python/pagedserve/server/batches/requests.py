"""Requests of a batch, a JSON object per line: ``custom_id``, ``method``, ``url`` and ``body``."""

import reprlib
from collections.abc import Collection
from typing import Any, NamedTuple

from pagedserve.server.batches.input_file import MAX_LINE_BYTES, BatchLine
from pagedserve.server.http.json_document import parsed


class BatchRequest(NamedTuple):
    """A request of a batch.

    Attributes:
        line: Line that it is from.
        custom_id: Id that the file gives it.
        url: Path of its route.
        body: Body of the request, parsed.
    """

    line: BatchLine
    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(Exception):
    """A line that is no request.

    Attributes:
        code: Kind of the error, in words joined by underscores.
        custom_id: Id of the line; None if it has none, or that of an earlier line.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        """Create an error."""
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


class RequestReader:
    """Parses lines; remembers the ids of all of them."""

    def __init__(self, urls: Collection[str]) -> None:
        """Accept requests to these routes."""
        self._urls = urls
        self._custom_ids: set[str] = set()

    def read(self, line: BatchLine) -> BatchRequest:
        """Parse the next line of the input.

        Raises:
            LineError: The line is no request.
        """
        given = _parsed(line.content)
        custom_id = self._custom_id(given.get("custom_id"))
        method, url, body = given.get("method"), given.get("url"), given.get("body")
        if method != "POST":
            message = f"method is {reprlib.repr(method)}; it must be 'POST'"
            raise LineError("invalid_method", message, custom_id)
        if not isinstance(url, str) or url not in self._urls:
            message = f"url is {reprlib.repr(url)}; accepted are {', '.join(self._urls)}"
            raise LineError("invalid_url", message, custom_id)
        if not isinstance(body, dict):
            message = f"body is {reprlib.repr(body)}; it must be a JSON object"
            raise LineError("invalid_body", message, custom_id)
        return BatchRequest(line, custom_id, url, body)

    def _custom_id(self, given: object) -> str:
        if not isinstance(given, str):
            shown = "missing" if given is None else reprlib.repr(given)
            message = f"custom_id is {shown}; it must be a string"
            raise LineError("invalid_custom_id", message)
        if given in self._custom_ids:
            message = f"custom_id is {reprlib.repr(given)}, that of an earlier line"
            raise LineError("duplicate_custom_id", message)
        self._custom_ids.add(given)
        return given


def _parsed(content: bytes) -> dict[str, Any]:
    if len(content) > MAX_LINE_BYTES:
        message = f"the line is too large; at most {MAX_LINE_BYTES} bytes are accepted"
        raise LineError("invalid_json_line", message)
    try:
        given = parsed(content)
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json_line", f"the line is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise LineError("invalid_json_line", "the line is no JSON object")
    return given

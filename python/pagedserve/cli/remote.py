"""HTTP client of ``chat`` and ``complete`` for a running server.

The standard library suffices for one request at a time, so these commands need no extra.  Closing a
stream closes its connection, which aborts the request.
"""

import http.client
import json
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias
from urllib.error import HTTPError, URLError

import pagedserve.checks as checks
from pagedserve.bench.api import bearer, error_message, refusal_message
from pagedserve.bench.stream import DONE, EventReader
from pagedserve.errors import RequestError

Json: TypeAlias = dict[str, Any]

_MAX_CHARS = 500
_CUT_OFF = "the response was cut off by the server"


class Remote:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Prepare requests; none is sent yet.

        Args:
            url: Address of the server, ``/v1`` included.
            api_key: Bearer token; None uses that of the environment.

        Raises:
            RequestError: An address without http:// or https://.
            ConfigError: An invalid key.
        """
        self.url = checks.url("--url", url).rstrip("/")
        self._headers = {"Content-Type": "application/json", **bearer(api_key)}

    def first_model(self) -> str:
        """The first model that the server lists.

        Raises:
            RequestError: It lists none, does not respond, or refuses.
        """
        with self._asked("/models") as response:
            answer = response.read()
        try:
            return str(json.loads(answer)["data"][0]["id"])
        except (LookupError, TypeError, ValueError):
            reason = "names no model: give --model-name"
            raise RequestError(f"the server at {self.url} {reason}") from None

    def stream(
        self, path: str, body: Json, text_of: Callable[[Json], object]
    ) -> Generator[str, None, None]:
        """Send a request and read its stream.

        Args:
            path: Path of the endpoint, after the server's address.
            body: Fields of the request.
            text_of: Returns the text of a choice of an event; None without any.

        Yields:
            Chunks of the text, as they arrive.

        Raises:
            RequestError: The server does not respond, refuses, fails, or sends no stream.
        """
        reason = None
        with self._asked(path, {**body, "stream": True}) as response:
            for event in _events(response):
                for choice in _choices(event):
                    text = text_of(choice) or ""
                    if not isinstance(text, str):
                        raise _no_event(json.dumps(event).encode())
                    yield text
                    reason = choice.get("finish_reason") or reason
        if reason in (None, "abort"):
            raise RequestError(_CUT_OFF)

    @contextmanager
    def _asked(
        self, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a request; every failure is an error of one line."""
        data = None if body is None else json.dumps(body).encode()
        address = self.url + path
        try:
            request = urllib.request.Request(address, data)  # noqa: S310  # http
            for name, value in self._headers.items():  # a redirect must not receive the key
                request.add_unredirected_header(name, value)
            with urllib.request.urlopen(request) as response:  # noqa: S310  # as above
                yield response
        except RequestError:  # what the response says
            raise
        except HTTPError as error:
            said = refusal_message(_body(error).decode(errors="replace"))[:_MAX_CHARS]
            after = error.headers.get("Retry-After")
            hint = "" if after is None else f" (Retry-After: {after})"
            if error.code == http.client.NOT_FOUND and not self.url.endswith("/v1"):
                hint += " (the URL of a server's API ends in /v1)"
            raise RequestError(
                f"{address} responded with {error.code}: {said or error.reason}{hint}"
            ) from None
        except http.client.IncompleteRead:
            raise RequestError(_CUT_OFF) from None
        except URLError as error:
            raise RequestError(f"no server responds at {self.url}: {error.reason}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # an invalid URL, too
            raise RequestError(f"{address}: {error}") from None


def _body(error: HTTPError) -> bytes:
    """Body of an error response; empty if it is cut off."""
    with error, suppress(OSError, http.client.HTTPException):
        return error.read()
    return b""


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The contents of a stream's events, as they arrive."""
    reader = EventReader()
    while piece := response.read1():
        for data in reader.feed(piece):
            if data == DONE:
                return
            try:
                yield json.loads(data)
            except ValueError:
                raise _no_event(data) from None


def _choices(event: Any) -> list[Json]:
    """The choices of an event.

    Raises:
        RequestError: The event is an error, or none of OpenAI's.
    """
    choices = event.get("choices") if isinstance(event, dict) else None
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        return choices
    if isinstance(event, dict) and event.get("error"):
        raise RequestError(f"the server failed: {error_message(event)}")
    raise _no_event(json.dumps(event).encode())


def _no_event(data: bytes) -> RequestError:
    return RequestError(f"the server sent an event that is none of OpenAI's: {data[:200]!r}")

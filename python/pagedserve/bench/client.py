"""One HTTP request, with the arrival times of its output.

A failed request is an ``Outcome`` with a ``Failure``, never an exception: no server can end a run.
No request is retried.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

from pagedserve.bench.api import Api, read_chunk, refusal_message
from pagedserve.bench.outcome import (
    BROKEN_STREAM,
    CONNECTION,
    REFUSED,
    TIMEOUT,
    Failure,
    Outcome,
)
from pagedserve.bench.stream import AnswerReader, EventReader
from pagedserve.errors import ConfigError

_OK = 200
_UNAVAILABLE = 503
_REFUSALS = (429, _UNAVAILABLE)
_MESSAGE_LENGTH = 200

# Servers close idle connections, uvicorn after 5 seconds.  A request sent at that moment fails, so
# a
# connection that has been idle for longer than this is not reused.
_IDLE_SECONDS = 3.0

# Timeout for listing the models.
_PROBE_SECONDS = 30.0


class NotReadyError(ConfigError):
    """No server responds at the address yet, or it is loading."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to be sent.

    Attributes:
        body: JSON, serialized beforehand so that its time is not measured.
        due_s: Planned send time, in seconds from the start of the run.
        num_input_tokens: Planned tokens of its prompt.
        headers: Headers beside those of all requests.
    """

    body: bytes
    due_s: float
    num_input_tokens: int
    headers: Mapping[str, str] = field(default_factory=dict)


def open_session(*, headers: Mapping[str, str], timeout_s: float) -> aiohttp.ClientSession:
    """Open connections for any number of concurrent requests; to be closed by the caller.

    Args:
        headers: Headers of each request.
        timeout_s: Timeout of a request with its response.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers,
    )


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str | None:
    """The first model that a server lists; None if it lists none.

    Raises:
        NotReadyError: No server responds at the address, or it responds with status 503.
        ConfigError: The address is invalid.
    """
    url = f"{base_url}/v1/models"
    timeout = aiohttp.ClientTimeout(_PROBE_SECONDS)
    try:
        async with session.get(url, timeout=timeout, raise_for_status=True) as response:
            answer = await response.json(content_type=None)
        return str(answer["data"][0]["id"])
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        raise NotReadyError(f"no server answers at {base_url}: {_said(error)}") from error
    except aiohttp.ClientResponseError as error:
        if error.status != _UNAVAILABLE:
            return None
        raise NotReadyError(f"the server at {base_url} is not ready: status 503") from error
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"{base_url} is no address of a server") from error
    except (aiohttp.ClientError, LookupError, TypeError, ValueError):
        return None


class Client:
    """Sends jobs to one endpoint."""

    def __init__(
        self, session: aiohttp.ClientSession, *, url: str, api: Api, keeps_texts: bool = False
    ) -> None:
        self._session = session
        self._url = url
        self._api = api
        self._keeps_texts = keeps_texts

    async def send(self, job: Job, *, due: float) -> Outcome:
        """Send a job now and read its response to the end.

        Args:
            job: Job to send.
            due: Planned send time, by ``time.perf_counter``.

        Returns:
            The outcome, which may be a failure.
        """
        outcome = Outcome(
            due=due,
            started=time.perf_counter(),
            num_input_tokens=job.num_input_tokens,
            texts=[] if self._keeps_texts else None,
        )
        kind = CONNECTION
        try:
            async with self._session.post(
                self._url,
                data=job.body,
                headers={"Content-Type": "application/json", **job.headers},
            ) as response:
                kind = BROKEN_STREAM
                if response.status != _OK:
                    outcome.failure = await _refusal(response)
                elif self._api.is_pooling:
                    self._take_whole(await response.read(), outcome)
                else:
                    outcome.failure = await self._follow(response.content, outcome)
        except TimeoutError:
            outcome.failure = Failure(TIMEOUT, "the answer took longer than --request-timeout")
        except aiohttp.ClientPayloadError:
            outcome.failure = Failure(kind, "the connection ended before the answer did")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.failure = Failure(kind, _said(error))
        return outcome

    def _take_whole(self, data: bytes, outcome: Outcome) -> None:
        """Record the response of a pooling model, which has no output tokens."""
        outcome.ended, outcome.num_output_tokens = time.perf_counter(), 0
        counted = read_chunk(self._api, data).num_prompt_tokens
        if counted is not None:
            outcome.num_input_tokens = counted

    async def _follow(self, stream: aiohttp.StreamReader, outcome: Outcome) -> Failure | None:
        """Read a stream to its end; events that were read together have the same time."""
        events = EventReader()
        answer = AnswerReader(self._api, outcome)
        async for piece in stream.iter_any():
            moment = time.perf_counter()
            for data in events.feed(piece):
                failure = answer.take(data, moment)
                if failure is not None:
                    return failure
        return answer.end()


async def _refusal(response: aiohttp.ClientResponse) -> Failure:
    """Convert a response with a status other than 200 to a failure."""
    said = refusal_message(await response.text(errors="replace"))
    message = " ".join((said or response.reason or "no message").split())[:_MESSAGE_LENGTH]
    if response.status in _REFUSALS:
        after = response.headers.get("Retry-After")
        hint = f" (Retry-After: {after})" if after else ""
        return Failure(REFUSED, f"status {response.status}: {message}{hint}")
    return Failure(f"status_{response.status}", message)


def _said(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error  # without aiohttp's text about TLS
    return " ".join(str(error).split())[:_MESSAGE_LENGTH] or type(error).__name__

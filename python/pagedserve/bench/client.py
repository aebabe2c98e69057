"""One streamed request over HTTP, and when each piece of its answer came.

A request that fails is an ``Outcome`` with a ``Failure``, never an exception: nothing that a server
does ends a run.  Nothing is sent twice.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from pagedserve.bench.api import Api, refusal_message
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
_REFUSALS = (429, 503)
_MESSAGE_LENGTH = 200

# Servers close what was idle for a while, uvicorn after 5 seconds.  A request that is sent at that
# very moment fails, so no connection is used again that has been idle for longer than this.
_IDLE_SECONDS = 3.0

# To say which models there are takes a server no time.
_PROBE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """A request that is ready to be sent.

    Attributes:
        body: JSON, made beforehand: making it takes time that belongs to no request.
        due_s: When to send it, in seconds from the start of the run.
        num_input_tokens: Of its prompt, as planned.
    """

    body: bytes
    due_s: float
    num_input_tokens: int


def open_session(*, headers: Mapping[str, str], timeout_s: float) -> aiohttp.ClientSession:
    """Connections for any number of requests at a time; to be closed by the caller.

    Args:
        headers: Sent with each request.
        timeout_s: For a whole request, its answer included.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers,
    )


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str | None:
    """The first model that a server offers; None where it does not say.

    Raises:
        ConfigError: No server answers there.
    """
    url = f"{base_url}/v1/models"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(_PROBE_SECONDS)) as response:
            answer = await response.json(content_type=None) if response.status == _OK else {}
        return str(answer["data"][0]["id"])
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        raise ConfigError(f"no server answers at {base_url}: {_said(error)}") from error
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"{base_url} is no address of a server") from error
    except (aiohttp.ClientError, LookupError, TypeError, ValueError):
        return None


class Client:
    """Sends jobs to one endpoint."""

    def __init__(self, session: aiohttp.ClientSession, *, url: str, api: Api) -> None:
        self._session = session
        self._url = url
        self._api = api

    async def send(self, job: Job, *, due: float) -> Outcome:
        """Send a job now and follow its answer to the end.

        Args:
            job: What to send.
            due: When it should have been sent, by ``time.perf_counter``.

        Returns:
            What came of it, a failure included.
        """
        outcome = Outcome(
            due=due, started=time.perf_counter(), num_input_tokens=job.num_input_tokens
        )
        kind = CONNECTION
        try:
            async with self._session.post(
                self._url, data=job.body, headers={"Content-Type": "application/json"}
            ) as response:
                kind = BROKEN_STREAM
                if response.status == _OK:
                    outcome.failure = await self._follow(response.content, outcome)
                else:
                    outcome.failure = await _refusal(response)
        except TimeoutError:
            outcome.failure = Failure(TIMEOUT, "the answer took longer than --request-timeout")
        except aiohttp.ClientPayloadError:
            outcome.failure = Failure(kind, "the connection ended before the answer did")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.failure = Failure(kind, _said(error))
        return outcome

    async def _follow(self, stream: aiohttp.StreamReader, outcome: Outcome) -> Failure | None:
        """Read a stream to its end; events that were read together came at one moment."""
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
    """What a status other than 200 means."""
    said = refusal_message(await response.text(errors="replace"))
    message = " ".join((said or response.reason or "no message").split())[:_MESSAGE_LENGTH]
    if response.status in _REFUSALS:
        after = response.headers.get("Retry-After")
        hint = f" (Retry-After: {after})" if after else ""
        return Failure(REFUSED, f"status {response.status}: {message}{hint}")
    return Failure(f"status_{response.status}", message)


def _said(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error  # without what aiohttp says of encryption
    return " ".join(str(error).split())[:_MESSAGE_LENGTH] or type(error).__name__

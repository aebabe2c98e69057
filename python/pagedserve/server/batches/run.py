"""A run of a batch: requests to the handlers of the server, as many at once as a capacity allows.

Invariants:

1. A line of the input is answered once, whatever the number of runs: see ``OutputFile``.
2. As many sequences run or wait as the capacity has, whatever the number of lines; lines that
   follow wait in the file.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from pydantic import BaseModel

from pagedserve.errors import RequestError
from pagedserve.server.batches.input_file import BatchLine, InputFile
from pagedserve.server.batches.output_file import OutputFile
from pagedserve.server.batches.requests import BatchRequest, LineError, RequestReader
from pagedserve.server.chat.job import chat_job
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.completions.job import completion_job
from pagedserve.server.completions.protocol import CompletionBody
from pagedserve.server.context import Context
from pagedserve.server.http.apis import OPENAI
from pagedserve.server.http.body import sizes_of, validated
from pagedserve.server.http.errors import UnavailableError, reported
from pagedserve.server.job import Job
from pagedserve.server.pooling.job import embedding_job
from pagedserve.server.pooling.protocol import EmbeddingBody
from pagedserve.server.responses.job import responses_job
from pagedserve.server.responses.protocol import ResponsesBody

T = TypeVar("T")

# Seconds until a request is tried again that the server had no capacity for.
_RETRY: Final = 0.2
# Seconds between checks whether requests of others leave capacity.
_LOOK: Final = 0.05


class _Route(NamedTuple):
    """A route of the server.

    Attributes:
        body: Type of its bodies.
        make_job: Creates the job of a request, from context, body, id of the response and owner.
        prefix: Prefix of the ids of its responses.
    """

    body: type[BaseModel]
    make_job: Callable[[Context, Any, str, bytes], Awaitable[Job]]
    prefix: str


def _without_owner(
    make_job: Callable[[Context, Any, str], Awaitable[Job]],
) -> Callable[[Context, Any, str, bytes], Awaitable[Job]]:
    """A function with an owner, for jobs that store nothing."""
    return lambda context, body, answer_id, _: make_job(context, body, answer_id)


async def _responses_job(context: Context, body: ResponsesBody, _: str, owner: bytes) -> Job:
    return await responses_job(context, body, owner)  # makes its id


_ROUTES: Final = {
    "/v1/chat/completions": _Route(ChatBody, _without_owner(chat_job), "chatcmpl"),
    "/v1/completions": _Route(CompletionBody, _without_owner(completion_job), "cmpl"),
    "/v1/embeddings": _Route(EmbeddingBody, _without_owner(embedding_job), "embd"),
    "/v1/responses": _Route(ResponsesBody, _responses_job, "resp"),
}
# Paths of the routes that requests may name.
URLS: Final = tuple(_ROUTES)


class Capacity:
    """Sequences that batches may have in the engine; a request with more than that runs alone."""

    def __init__(self, num_seqs: int, is_busy: Callable[[], bool] = lambda: False) -> None:
        """Allow some sequences.

        Args:
            num_seqs: Number of sequences, at least one.
            is_busy: Whether requests of others leave no capacity for a next one.
        """
        self._num_free = num_seqs
        self._is_busy = is_busy
        self._given_back = asyncio.Event()

    async def take(self, num_seqs: int) -> None:
        """Wait until some are free, and take as many as are needed."""
        while self._num_free <= 0 or self._is_busy():
            self._given_back.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._given_back.wait()
        self._num_free -= num_seqs

    def give_back(self, num_seqs: int) -> None:
        """Give back what ``take`` took."""
        self._num_free += num_seqs
        self._given_back.set()


class BatchRun:
    """A batch that is being worked through."""

    def __init__(
        self,
        context: Context,
        output: OutputFile,
        capacity: Capacity,
        *,
        advance: Callable[[], None],
        urls: Collection[str] = URLS,
        owner: bytes = b"",
        priority: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            context: State of a server that accepts requests.
            output: Receives the responses.
            capacity: Limits the requests in the engine.
            advance: Called after each line that this run has worked through; an exception of it
                ends the run.
            urls: Paths of the routes that requests may name.
            owner: Digest of the API key that the responses belong to.
            priority: Priority of all requests; None leaves them theirs.
        """
        self._context = context
        self._output = output
        self._capacity = capacity
        self._advance = advance
        self._reader = RequestReader(urls)
        self._owner = owner
        self._priority = priority

    async def run(self, source: InputFile) -> None:
        """Work through all lines; the first error that is not a request's own ends the run.

        Raises:
            EngineDeadError: The engine died.
            OSError: The input cannot be read, or the output not be written.
        """
        try:
            async with asyncio.TaskGroup() as tasks, aclosing(source.lines()) as lines:
                async for line in lines:
                    await self._take(line, tasks)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _take(self, line: BatchLine, tasks: asyncio.TaskGroup) -> None:
        """Start the request of a line, once there is capacity; refuse what is no request."""
        if not line.content.strip():
            self._advance()
            return
        try:
            request = self._reader.read(line)
        except LineError as error:
            if not self._output.has(line, error.custom_id):
                self._output.add_error(line, error)
                self._advance()
            return
        if self._output.has(line, request.custom_id):  # answered by an earlier run
            return
        request_id = uuid.uuid4().hex
        try:
            job = await self._when_accepted(partial(self._job, request, request_id))
        except Exception as error:  # noqa: BLE001  # it concerns this request only
            self._refuse(request, request_id, error)
            return
        await self._capacity.take(job.num_seqs)
        answer = tasks.create_task(self._answer(request, request_id, job))
        # Also if it is cancelled before it begins.
        answer.add_done_callback(lambda _: self._capacity.give_back(job.num_seqs))
        await asyncio.sleep(0)  # it is counted among the requests of the server

    async def _job(self, request: BatchRequest, request_id: str) -> Job:
        context, route = self._context, _ROUTES[request.url]
        num_bytes = len(request.line.content)
        read = partial(
            validated,
            request.body,
            route.body,
            sizes_of(context),
            num_bytes=num_bytes,
            allows_unknown=context.args.allow_unknown_fields,
        )
        body: Any = await context.for_body(read, num_bytes=num_bytes)
        if getattr(body, "stream", False):
            message = "stream is True; the responses of a batch are whole, so leave it out"
            raise RequestError(message, param="stream")
        if self._priority is not None:
            body.priority = self._priority
        named = body.request_id or request_id
        return await route.make_job(context, body, f"{route.prefix}-{named}", self._owner)

    async def _answer(self, request: BatchRequest, request_id: str, job: Job) -> None:
        try:
            content = await self._when_accepted(partial(_whole, job))
        except Exception as error:  # noqa: BLE001  # as above
            self._refuse(request, request_id, error)
        else:
            self._output.add_response(request, request_id, content)
            self._advance()

    async def _when_accepted(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Attempt something again as long as the server has no capacity for it."""
        while True:
            try:
                return await attempt()
            except UnavailableError:
                if self._context.client.errored:
                    raise
            await asyncio.sleep(_RETRY)

    def _refuse(self, request: BatchRequest, request_id: str, error: Exception) -> None:
        """Write the error of a request, unless the engine has died.

        Raises:
            EngineDeadError: It has died, so that a later run answers the request.
        """
        client = self._context.client
        if client.errored:
            raise client.dead_error
        told = reported(error)
        self._output.add_refusal(request, request_id, told, OPENAI.error(told, request_id))
        self._advance()


async def _whole(job: Job) -> bytes:
    """Return the whole response of a job."""
    async with aclosing(job.answer()) as chunks:
        (content,) = [chunk async for chunk in chunks]
    return content

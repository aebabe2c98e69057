"""A run of a batch: requests to the handlers of the server, as many at once as the scheduler takes.

Invariants:

1. A line of the input is answered once, whatever the number of runs: see ``OutputFile``.
2. As many sequences run or wait as fill the next steps of the scheduler, whatever the number of
   lines; lines that follow wait in the file.
"""

import asyncio
import dataclasses
import gc
import sys
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from pagedserve.batch_files.input_file import BatchLine, InputFile
from pagedserve.batch_files.output_file import OutputFile
from pagedserve.batch_files.progress import Progress
from pagedserve.batch_files.requests import BatchRequest, LineError, RequestReader
from pagedserve.config import EngineArgs
from pagedserve.errors import RequestError
from pagedserve.models.load.progress import progress_shown
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.apis import OPENAI
from pagedserve.server.body import sizes_of, validated
from pagedserve.server.chat import chat_job
from pagedserve.server.completions import completion_job
from pagedserve.server.context import Context, make_context
from pagedserve.server.errors import reported
from pagedserve.server.job import Job
from pagedserve.server.options import ServerArgs
from pagedserve.server.pooling import embedding_job
from pagedserve.server.protocol import ChatBody, CompletionBody, EmbeddingBody
from pagedserve.server.responses.body import ResponsesBody
from pagedserve.server.responses.job import ResponsesJob, responses_job
from pagedserve.server.start import start_engine

# Sequences in the engine for each that the scheduler runs at once: the next ones wait there.
_SEQS_PER_SLOT: Final = 2


class _Route(NamedTuple):
    """A route of the server.

    Attributes:
        body: Type of its bodies.
        make_job: Creates the job of a request, from context, body and id of the response.
        prefix: Prefix of the ids of its responses.
    """

    body: type[BaseModel]
    make_job: Callable[[Context, Any, str], Awaitable[Job]]
    prefix: str


async def _responses_job(context: Context, body: ResponsesBody, _: str) -> ResponsesJob:
    return await responses_job(context, body, owner=b"")  # makes its id; there are no API keys


_ROUTES: Final = {
    "/v1/chat/completions": _Route(ChatBody, chat_job, "chatcmpl"),
    "/v1/completions": _Route(CompletionBody, completion_job, "cmpl"),
    "/v1/embeddings": _Route(EmbeddingBody, embedding_job, "embd"),
    "/v1/responses": _Route(ResponsesBody, _responses_job, "resp"),
}


def run_batch(
    engine_args: EngineArgs,
    server_args: ServerArgs,
    source: InputFile,
    output: OutputFile,
    chat_template: str | None,
) -> str:
    """Load a model and work through a file of requests.

    Args:
        engine_args: Options of the engine.
        server_args: Options of responses.
        source: Requests.
        output: Receives their responses; those that it has are not requested again.
        chat_template: Overrides the model's chat template.

    Returns:
        Lines per second, with the unit.

    Raises:
        ConfigError: Arguments that contradict the model or the memory.
        ModelLoadError: The model cannot be found, read or run.
        RequestError: An adapter is invalid.
        EngineDeadError: The engine died.
        OSError: The input cannot be read, or the output not be written.
    """
    # Lines wait in the file, so that the limit of a server's queue is not needed.
    server_args = dataclasses.replace(server_args, max_num_queued_reqs=sys.maxsize)
    default_params: Future[SamplingParams] = Future()
    client = start_engine(engine_args, server_args, default_params)
    client.wait_until_ready()
    names = server_args.served_model_name or (engine_args.model,)
    context = make_context(
        client, names, server_args, default_params=default_params, chat_template=chat_template
    )
    gc.collect()
    gc.freeze()  # the objects of the start, which each full collection would traverse
    with (
        progress_shown(is_shown=True),
        closing(Progress(source.num_lines, output.num_lines)) as progress,
    ):
        batch = Batch(context, output, progress, max_num_seqs=client.max_num_seqs)
        try:
            asyncio.run(batch.run(source))
            return progress.rate()
        finally:
            client.shutdown()


class Batch:
    """A batch that is being worked through."""

    def __init__(
        self, context: Context, output: OutputFile, progress: Progress, *, max_num_seqs: int
    ) -> None:
        """Prepare.

        Args:
            context: State of a server, not open yet.
            output: Receives the responses.
            progress: Counts the lines.
            max_num_seqs: Maximum number of sequences that the engine runs at once.
        """
        self._context = context
        self._output = output
        self._progress = progress
        self._max_num_seqs = max_num_seqs
        self._reader = RequestReader(_ROUTES)
        self._capacity = _Capacity(_SEQS_PER_SLOT * max_num_seqs)

    async def run(self, source: InputFile) -> None:
        """Work through all lines; the first error that is not a request's own ends the run.

        Raises:
            RequestError: An adapter is invalid.
            EngineDeadError: The engine died.
            OSError: The input cannot be read, or the output not be written.
        """
        await self._context.open(self._max_num_seqs)
        try:
            async with asyncio.TaskGroup() as tasks, aclosing(source.lines()) as lines:
                async for line in lines:
                    await self._take(line, tasks)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _take(self, line: BatchLine, tasks: asyncio.TaskGroup) -> None:
        """Start the request of a line, once there is capacity; refuse what is no request."""
        if not line.content.strip():
            self._progress.advance()
            return
        try:
            request = self._reader.read(line)
        except LineError as error:
            if not self._output.has(line, error.custom_id):
                self._output.add_error(line, error)
                self._progress.advance()
            return
        if self._output.has(line, request.custom_id):  # answered by an earlier run
            return
        request_id = uuid.uuid4().hex
        try:
            job = await self._job(request, request_id)
        except Exception as error:  # noqa: BLE001  # it concerns this request only
            self._refuse(request, request_id, error)
            return
        await self._capacity.take(job.num_seqs)
        tasks.create_task(self._answer(request, request_id, job))

    async def _job(self, request: BatchRequest, request_id: str) -> Job:
        context, route = self._context, _ROUTES[request.url]
        num_bytes = len(request.line.content)
        read = partial(validated, request.body, route.body, sizes_of(context), num_bytes=num_bytes)
        body: Any = await context.for_body(read, num_bytes=num_bytes)
        if getattr(body, "stream", False):
            message = "stream is True; the responses of a batch are whole, so leave it out"
            raise RequestError(message, param="stream")
        named = body.request_id or request_id
        return await route.make_job(context, body, f"{route.prefix}-{named}")

    async def _answer(self, request: BatchRequest, request_id: str, job: Job) -> None:
        try:
            async with aclosing(job.answer()) as chunks:
                (content,) = [chunk async for chunk in chunks]
        except Exception as error:  # noqa: BLE001  # as above
            self._refuse(request, request_id, error)
        else:
            self._output.add_response(request, request_id, content)
            self._progress.advance()
        finally:
            self._capacity.give_back(job.num_seqs)

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
        self._progress.advance()


class _Capacity:
    """Sequences that may be in the engine; a request with more than that runs alone."""

    def __init__(self, num_seqs: int) -> None:
        self._num_free = num_seqs
        self._given_back = asyncio.Event()

    async def take(self, num_seqs: int) -> None:
        """Wait until some are free, and take as many as are needed."""
        while self._num_free <= 0:
            self._given_back.clear()
            await self._given_back.wait()
        self._num_free -= num_seqs

    def give_back(self, num_seqs: int) -> None:
        """Give back what ``take`` took."""
        self._num_free += num_seqs
        self._given_back.set()

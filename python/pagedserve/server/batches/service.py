"""Batches of a server: kept in a directory, run by its engine, resumed at its next start.

Invariants:

1. The state of a batch is stored before a client sees it, but for the counts of a running one.
2. A batch that has not ended has its responses so far in a file beside its object.  At its end they
   become files of its API key: first these are stored, then the end, and then that file is deleted.
   Where they cannot be stored, as on a full disk, this is tried again until they are.
3. A request of a batch is started only where no request waits, and batches leave a quarter of the
   sequences free.  Their priority is the lowest.
"""

import asyncio
import logging
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from pagedserve.errors import EngineDeadError
from pagedserve.server.batches.input_file import InputFile, input_file
from pagedserve.server.batches.output_file import OutputFile, divide, output_file
from pagedserve.server.batches.protocol import (
    BatchBody,
    BatchError,
    BatchErrors,
    BatchObject,
    End,
    Status,
    window_seconds,
)
from pagedserve.server.batches.run import URLS, BatchRun, Capacity
from pagedserve.server.context import Context
from pagedserve.server.files.protocol import FileObject
from pagedserve.server.files.records import Records, new_id
from pagedserve.server.files.store import FileStore
from pagedserve.server.files.thread import to_end
from pagedserve.server.http.errors import ServerError, reported, scrubbed
from pagedserve.server.protocol import MAX_INT

logger = logging.getLogger(__name__)

# Batches of all API keys; the oldest ones that have ended are dropped.
MAX_BATCHES: Final = 1000
# Batches that run at once; the next ones wait.
_MAX_RUNNING: Final = 4
# Part of the sequences of the scheduler that batches may have.
_SHARE: Final = 3 / 4
# Seconds until the files of a batch are written again, where they could not be.
_RETRY: Final = 60.0
_ROOT: Final = "/v1/"
_LOWEST_PRIORITY: Final = MAX_INT


class BatchService:
    """Batches of all API keys.

    Attributes:
        files: Their inputs and outputs.
        records: Their objects.
    """

    def __init__(self, context: Context, directory: Path) -> None:
        """Create the directory, or read what is in it.

        Args:
            context: State of the server.
            directory: The directory, which is locked for this process.

        Raises:
            ConfigError: It cannot be created or read, or has a damaged file.
        """
        self.files = FileStore(directory / "files", context.args.max_batch_directory_bytes)
        self._directory = directory / "batches"
        self.records = Records(self._directory, BatchObject, "batch")
        for _, batch in self.records:
            if batch.has_ended:
                self._responses(batch).unlink(missing_ok=True)
        self._context = context
        self._capacity: Capacity | None = None  # while none may run
        self._running = asyncio.Semaphore(_MAX_RUNNING)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Bytes of the responses so far, by the ids of the running batches.
        self._num_bytes: dict[str, int] = {}

    def start(self, max_num_seqs: int) -> None:
        """Run the batches that have not ended, and those that come.

        Args:
            max_num_seqs: Maximum number of sequences that the engine runs at once.
        """
        admission = self._context.admission
        self._capacity = Capacity(
            max(1, int(_SHARE * max_num_seqs)), lambda: admission.num_seqs >= max_num_seqs
        )
        for owner, batch in self.records:
            if not batch.has_ended:
                self._start(owner, batch)

    async def stop(self) -> None:
        """Abort the requests of all batches, which the next start of a server resumes."""
        self._capacity = None
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def create(self, owner: bytes, body: BatchBody) -> BatchObject:
        """Create a batch.

        Args:
            owner: Digest of the API key.
            body: Body of the request.

        Raises:
            ServerError: 404, its input does not exist; 400, a field is not accepted; 503, too many
                batches wait.
        """
        self.files.drop_expired(self.check_unused)
        self.files.records.get(owner, body.input_file_id, param="input_file_id")
        if body.endpoint not in URLS:
            names = ", ".join(url.removeprefix(_ROOT) for url in URLS)  # messages have no paths
            text = f"endpoint must be {_ROOT} with one of {names}"
            raise ServerError(400, text, param="endpoint")
        self.files.check_count()
        self._make_room()
        now = int(time.time())
        batch = BatchObject(
            id=new_id("batch_"),
            created_at=now,
            expires_at=now + window_seconds(body.completion_window),
            **body.model_dump(),
        )
        self.records.put(owner, batch)
        self._start(owner, batch)
        return batch

    def _make_room(self) -> None:
        """Drop the oldest batch that has ended, if `MAX_BATCHES` are stored."""
        if len(self.records) < MAX_BATCHES:
            return
        ended = next((batch for _, batch in self.records if batch.has_ended), None)
        if ended is None:
            text = f"{len(self.records)} batches wait; at most {MAX_BATCHES} are accepted"
            raise ServerError(503, text, retry_after=60)
        self.records.delete(ended)

    def cancel(self, owner: bytes, batch_id: str) -> BatchObject:
        """Cancel a batch, whose responses so far become its output.

        Raises:
            ServerError: 404, it does not exist; 400, it has ended, or is about to.
        """
        batch = self.records.get(owner, batch_id, param="batch_id")
        if batch.has_ended or batch.status == "finalizing":
            raise ServerError(400, f"the batch is {batch.status}, and cannot be cancelled")
        if batch.cancelling_at is None:
            self._enter(owner, batch, "cancelling")
            if (task := self._tasks.get(batch.id)) is not None:
                task.cancel()
        return batch

    def check_unused(self, file: FileObject) -> None:
        """Check that no batch needs a file.

        Raises:
            ServerError: 400, one does.
        """
        for _, batch in self.records:
            if batch.input_file_id == file.id and not batch.has_ended:
                text = f"the file is the input of {batch.id}, which is {batch.status}"
                raise ServerError(400, f"{text}; cancel that first", param="file_id")

    def _start(self, owner: bytes, batch: BatchObject) -> None:
        if self._capacity is None:
            return
        task = asyncio.get_running_loop().create_task(self._work(owner, batch, self._capacity))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def _work(self, owner: bytes, batch: BatchObject, capacity: Capacity) -> None:
        """Work through a batch to its end, unless the server ends before."""
        end: End | None = "cancelled"
        if batch.cancelling_at is None:  # else it was cancelled before the server was restarted
            end = await self._end(owner, batch, capacity)
        while end is not None:
            try:
                await self._finish(owner, batch, end)
            except OSError:  # of a full disk, for example
                logger.exception("a batch could not be finished; the next try is in %g s", _RETRY)
            else:
                return
            try:
                await asyncio.sleep(_RETRY)
            except asyncio.CancelledError:
                if batch.cancelling_at is None:  # the server ends, and its next start resumes it
                    raise
                end = "cancelled"

    async def _end(self, owner: bytes, batch: BatchObject, capacity: Capacity) -> End | None:
        """Work through a batch; return how it has ended, None if the engine has died."""
        try:
            async with asyncio.timeout(batch.expires_at - time.time()), self._running:
                await self._answer(owner, batch, capacity)
        except TimeoutError:
            return "expired"
        except asyncio.CancelledError:
            if batch.cancelling_at is None:  # the server ends
                raise
            return "cancelled"
        except EngineDeadError:
            return None
        except Exception as error:  # noqa: BLE001  # the server serves on
            batch.errors = BatchErrors(data=[_failure(error)])
            return "failed"
        finally:
            self._num_bytes.pop(batch.id, None)
        return "completed"

    async def _answer(self, owner: bytes, batch: BatchObject, capacity: Capacity) -> None:
        """Answer the requests that have no response yet."""
        with ExitStack() as stack:
            batch.request_counts.total, source, output = await to_end(
                partial(self._open, stack, batch)
            )
            if not batch.request_counts.total:
                raise ServerError(400, "the input file has no request", param="input_file_id")
            self._enter(owner, batch, "in_progress")
            run = BatchRun(
                self._context,
                output,
                capacity,
                advance=partial(self._advance, batch, output),
                urls=(batch.endpoint,),
                owner=owner,
                priority=_LOWEST_PRIORITY,
            )
            await run.run(source)

    def _open(self, stack: ExitStack, batch: BatchObject) -> tuple[int, InputFile, OutputFile]:
        """Open the files of a batch; return the number of its requests, too."""
        path = self.files.path(batch.input_file_id)
        with path.open("rb") as lines:
            num_requests = sum(1 for line in lines if line.strip())
        source = stack.enter_context(input_file(str(path)))
        output = stack.enter_context(output_file(str(self._responses(batch)), source.file))
        return num_requests, source, output

    def _advance(self, batch: BatchObject, output: OutputFile) -> None:
        """Count the responses so far.

        Raises:
            ServerError: 400, they are too large to be stored.
        """
        batch.request_counts.failed = output.num_errors
        batch.request_counts.completed = output.num_lines - output.num_errors
        self._num_bytes[batch.id] = output.file.tell()
        self.files.drop_expired(self.check_unused)
        self.files.check_bytes(sum(self._num_bytes.values()))

    async def _finish(self, owner: bytes, batch: BatchObject, end: End) -> None:
        """Make files of the responses, and store how the batch has ended.

        Raises:
            OSError: They cannot be written.
        """
        if end != "cancelled":
            self._enter(owner, batch, "finalizing")
        responses = self._responses(batch)
        if responses.exists():
            output_id, error_id = (batch.id.replace("batch_", "file-") + each for each in "oe")
            output, errors = self.files.path(output_id), self.files.path(error_id)
            counts = batch.request_counts
            counts.completed, counts.failed = await to_end(
                partial(divide, responses, output, errors)
            )
            expiry = batch.output_expires_after
            lifetime = None if expiry is None else expiry.seconds
            if self.files.add_output(owner, output_id, f"{batch.id}_output.jsonl", lifetime):
                batch.output_file_id = output_id
            if self.files.add_output(owner, error_id, f"{batch.id}_error.jsonl", lifetime):
                batch.error_file_id = error_id
        self._enter(owner, batch, end)
        responses.unlink(missing_ok=True)

    def _enter(self, owner: bytes, batch: BatchObject, status: Status) -> None:
        """Store a new status, with the time of its first occurrence."""
        at = f"{status}_at"
        first = getattr(batch, at) or int(time.time())
        self.records.put(owner, batch, **{"status": status, at: first})

    def _responses(self, batch: BatchObject) -> Path:
        """Path of the responses of a batch that has not ended."""
        return self._directory / f"{batch.id}.jsonl"


def _failure(error: Exception) -> BatchError:
    """Why a batch has failed, without a path."""
    if isinstance(error, OSError):
        return BatchError(code="StorageError", message=f"{error.strerror}")
    told = reported(error)
    return BatchError(code=told.kind, message=scrubbed(told.message), param=told.param)

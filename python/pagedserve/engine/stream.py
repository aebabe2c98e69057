"""``Streams``: pass outputs of requests from the engine's thread to their readers."""

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pagedserve.engine.output_processor import merge_outputs
from pagedserve.engine.request import Request
from pagedserve.outputs import RequestOutput

T = TypeVar("T")


class Stream:
    """Outputs for one reader, in the reader's event loop; holds at most one unread output.

    Attributes:
        loop: Event loop of the reader.
        request: Request of the stream, once it is checked.
        is_aborted: Whether the request is to be aborted as soon as it is added.
        is_taken: Whether the engine's thread has taken the request; earlier outputs of its id are
            those of another request, whose abort is still queued.
        is_finished: Whether the reader has the last output.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create an empty stream in the event loop of the reader."""
        self.loop = loop
        self.request: Request | None = None
        self.is_aborted = False
        self.is_taken = False
        self.is_finished = False
        self._unread: RequestOutput | None = None
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Append an output."""
        assert self.request is not None  # noqa: S101  # the stream is taken
        self._unread = merge_outputs(self.request, self._unread, output)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """Wait for output; return everything since the last call.

        Raises:
            BaseException: The error of ``fail``, once everything before it was read.
        """
        while self._unread is None:
            if self._error is not None:
                raise self._error
            self._reader = self.loop.create_future()
            await self._reader
        output, self._unread = self._unread, None
        return output

    @property
    def has_begun(self) -> bool:
        """Whether a step has started the request."""
        request = self.request
        return request is not None and request.metrics.first_scheduled_time is not None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> bool:
    """Schedule a callback in an event loop; return False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


class Reader:
    """The reader of a stream, referenced only by the generator of its outputs.

    However the generator ends, also as garbage of a closed event loop, in which none of its code
    can run, this object is collected with it.
    """

    __slots__ = ("__weakref__", "leave")

    def __init__(self, leave: Callable[[], None]) -> None:
        """Register a callback for its end.

        Args:
            leave: Called once, by ``self.leave`` or when this object is collected: at any moment,
                in any thread, so it must take no lock.
        """
        self.leave = weakref.finalize(self, leave)
        self.leave.atexit = False


class Streams(dict[str, Stream]):
    """Streams of unfinished requests, by request id."""

    def __init__(self, abandon: Callable[[str], None]) -> None:
        """Start without streams.

        Args:
            abandon: Aborts a request in the engine; takes no lock (`Reader`).
        """
        super().__init__()
        self._abandon = abandon

    def hand_out(self, outputs: list[RequestOutput]) -> None:
        """Deliver outputs, waking each event loop once; called in the engine's thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self.get(output.request_id)
            if stream is not None and stream.is_taken:
                by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, delivery in by_loop.items():
            if not call_in(loop, partial(_deliver, delivery)):
                for stream, output in delivery:
                    self.leave(output.request_id, stream)

    def leave(self, request_id: str, stream: Stream) -> None:
        """End a stream that has no reader any more; callable at any moment, in any thread."""
        if self.get(request_id) is stream:
            del self[request_id]
            if stream.is_taken and not stream.is_finished:
                self._abandon(request_id)

    def leave_closed(self) -> None:
        """End the streams of event loops that were closed."""
        for request_id, stream in list(self.items()):
            if stream.loop.is_closed():
                self.leave(request_id, stream)

    def fail(self, error: BaseException) -> None:
        """End all streams with an error."""
        for stream in list(self.values()):
            call_in(stream.loop, partial(stream.fail, error))


def _deliver(outputs: list[tuple[Stream, RequestOutput]]) -> None:
    """Deliver outputs in the event loop of their streams."""
    for stream, output in outputs:
        stream.put(output)


def set_answer(answer: "asyncio.Future[T]", value: T) -> None:
    """Set a result in the event loop of its future, which may be cancelled."""
    if not answer.done():
        answer.set_result(value)

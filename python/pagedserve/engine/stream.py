"""``Stream``: the outputs of one request on their way from the engine's thread to its reader."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pagedserve.engine.request import Request
from pagedserve.outputs import RequestOutput
from pagedserve.sampling_params import RequestOutputKind

T = TypeVar("T")


class Stream:
    """Outputs for one reader, in the reader's event loop; holds at most one that is not read.

    Attributes:
        loop: The reader's.
        request: What it is the stream of, once that is checked.
        is_aborted: Whether the request is to end as soon as it is taken up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin without outputs, in the event loop of the reader."""
        self.loop = loop
        self.request: Request | None = None
        self.is_aborted = False
        self._unread: RequestOutput | None = None
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Hand an output over."""
        if self._unread is not None and self._brings_deltas:
            self._unread.add(output)
        else:
            self._unread = output
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Say that nothing more will come."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """All that came since the last call, at least one output.

        Raises:
            BaseException: What ``fail`` was told, once everything before it was read.
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
        """Whether a step has taken the request up."""
        request = self.request
        return request is not None and request.metrics.first_scheduled_time is not None

    @property
    def _brings_deltas(self) -> bool:
        return self.request is not None and self.request.output_kind is RequestOutputKind.DELTA

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def deliver(outputs: Iterable[tuple[Stream, RequestOutput]]) -> None:
    """Hand outputs over, in the event loop of their streams."""
    for stream, output in outputs:
        stream.put(output)


def call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> None:
    """Have a callback run in an event loop, unless that is closed: then nobody reads."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise


def set_answer(answer: "asyncio.Future[T]", value: T) -> None:
    """Give an answer, in the event loop of who asked and may have left."""
    if not answer.done():
        answer.set_result(value)

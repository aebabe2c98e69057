"""Deferral of Ctrl-C until a critical section ends."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class sigint_deferred:  # noqa: N801  # reads well in a with statement
    """A context that defers SIGINT; its handler runs when the context ends.

    Python runs signal handlers in the main thread only, so it does nothing in other threads, nor
    where SIGINT has no Python handler.
    """

    __slots__ = ("_handler", "_is_noted")

    def __enter__(self) -> Self:
        self._is_noted = False
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._is_noted:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._is_noted = True

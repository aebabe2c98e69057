"""Ctrl-C that waits for the end of what must not be torn."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class sigint_deferred:  # noqa: N801  # reads as what it does in a with statement
    """A context in which SIGINT is noted; its handler runs when the context ends.

    Only the main thread of a program runs handlers, so in any other nothing is to be done; nor is
    there where SIGINT has no handler of Python's.
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

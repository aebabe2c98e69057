"""A terminal of 50 columns in the place of this process's stderr."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

WIDTH = 50


class Terminal:
    """What is written to the terminal."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        self._shown = bytearray()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._master, 65536):
                self._shown += piece
        except OSError:  # nothing has it open any more
            pass

    def shown(self) -> str:
        """All that was written; closes the terminal."""
        self.file.close()
        self._reader.join()
        return self._shown.decode()


@contextmanager
def stderr_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A context in which stderr is a terminal."""
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal.file)
        yield terminal

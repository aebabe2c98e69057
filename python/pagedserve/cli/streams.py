"""The standard streams of a command, which may be closed, full, or without a reader."""

import io
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDOUT: Final = 1
_STDERR: Final = 2


def settle_standard_streams() -> None:
    """Open closed streams on the null device, and let no write to stderr fail.

    Otherwise the first sockets and files would get the descriptors of closed streams, and with them
    the output of libraries to stderr.  A log line, a warning or a progress bar that cannot be
    written is lost; it ends no load and no request, and does not change the exit status.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(_STDOUT, "w", encoding="utf-8", closefd=False)
    if sys.stderr is sys.__stderr__:  # else the calling program has replaced it
        sys.stderr = io.TextIOWrapper(
            _LossyOutput(_STDERR),
            encoding="utf-8" if sys.stderr is None else sys.stderr.encoding,
            errors="backslashreplace",
            line_buffering=True,
            write_through=True,
        )


class _LossyOutput(io.RawIOBase):
    """A raw stream to a file descriptor; data that it does not accept is lost."""

    def __init__(self, number: int) -> None:
        """Write to this descriptor, which stays open."""
        super().__init__()
        self._number = number

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """Number of the descriptor."""
        return self._number

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._number)

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write the data, or as much as is accepted; return the length of all of it."""
        left = memoryview(data)
        num_bytes = len(left)
        while left:
            try:
                left = left[os.write(self._number, left) :]
            except OSError:  # closed, full, or its reader has gone
                break
        return num_bytes


def complain(error: Exception) -> None:
    """Print an error on stderr, in one line."""
    print(f"pagedserve: error: {' '.join(str(error).split())}", file=sys.stderr)

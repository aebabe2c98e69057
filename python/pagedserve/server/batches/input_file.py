"""Lines of a batch's input, read a chunk at a time.

They are read in a separate thread: a pipe whose writer is slow delays no response, and Ctrl-C does
not wait for it.
"""

import os
import stat
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Final, NamedTuple

from pagedserve.engine.lanes import Lanes
from pagedserve.errors import ConfigError, reason

# Maximum size of a line, that of a server's body by default; more of a longer one is not kept.
MAX_LINE_BYTES: Final = 32 << 20
_CHUNK_BYTES: Final = 1 << 20
_STDIN: Final = 0


class BatchLine(NamedTuple):
    """A line of the input.

    Attributes:
        number: Number of the line, from 1.
        content: Bytes of the line, without the newline; at most one more than ``MAX_LINE_BYTES``.
    """

    number: int
    content: bytes


@dataclass(slots=True)
class InputFile:
    """An open file of requests.

    Attributes:
        file: File, or pipe, from the first line on.
        num_lines: Number of lines; None of a pipe.
    """

    file: BinaryIO
    num_lines: int | None

    async def lines(self) -> AsyncGenerator[BatchLine, None]:
        """Lines as they arrive, the last one also without a newline.

        Raises:
            OSError: The file cannot be read.
        """
        thread = Lanes("pagedserve-batch-input")
        read = partial(_read_some, self.file)
        number, begun, most = 0, bytearray(), MAX_LINE_BYTES + 1
        try:
            while chunk := await thread.run(read, cost=0, group=None):
                *ended, rest = chunk.split(b"\n")
                for content in ended:
                    number += 1
                    yield BatchLine(number, bytes(begun + content)[:most])
                    begun.clear()
                begun += rest[: most - len(begun)]
            if begun:
                yield BatchLine(number + 1, bytes(begun))
        finally:
            thread.shutdown()


def _read_some(file: BinaryIO) -> bytes:
    """Read what a pipe has, or the next chunk of a file."""
    return os.read(file.fileno(), _CHUNK_BYTES)


@contextmanager
def input_file(path: str) -> Iterator[InputFile]:
    """Open a file of requests.

    Args:
        path: Path of a file or of a pipe; "-" is stdin.

    Raises:
        ConfigError: It cannot be read.
    """
    is_stdin = path == "-"
    try:
        file = open(_STDIN if is_stdin else path, "rb", 0, closefd=not is_stdin)  # noqa: SIM115  # below
    except (OSError, ValueError) as error:
        raise ConfigError(f"input_file: cannot read {path}: {reason(error)}") from error
    with file:
        yield InputFile(file, _num_lines(file))


def _num_lines(file: BinaryIO) -> int | None:
    """Number of lines from the current position on; None of a pipe."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return None
    start, num_lines, last = file.tell(), 0, b""
    while chunk := _read_some(file):
        num_lines += chunk.count(b"\n")
        last = chunk
    file.seek(start)
    return num_lines + (last[-1:] not in {b"", b"\n"})

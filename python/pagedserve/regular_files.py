"""Safe reading of untrusted files.

A path where a file is expected may lead to a directory, a pipe without a writer, a link to itself
or a file of a terabyte, or be too long for a system call.  None of that blocks, exhausts the
memory or raises an undocumented exception here.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

MAX_PATH_CHARACTERS: Final = 4096
# Limit of safetensors for a header.
MAX_SAFETENSORS_HEADER_BYTES: Final = 100_000_000
# Configs have some kilobytes; those that name 20,000 classes a megabyte.
MAX_JSON_BYTES: Final = 16 << 20
MAX_JSON_DEPTH: Final = 100


def is_file(path: Path) -> bool:
    """Whether a path leads to a regular file; False for an invalid path."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def expanded(path: str) -> Path:
    """Expand ``~`` in a path to the home directory.

    Raises:
        ValueError: The path is invalid.
    """
    if "\0" in path:
        raise ValueError("has a NUL character, which no path can have")
    if len(path) > MAX_PATH_CHARACTERS:
        raise ValueError(
            f"has {len(path)} characters; accepted are paths of at most {MAX_PATH_CHARACTERS}"
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"begins with the home directory of a user that is unknown: {path!r}"
        ) from error


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a regular file.

    Raises:
        ValueError: It is not a regular file, cannot be read, or is larger than ``max_bytes``.
    """
    with opened(path) as (file, num_bytes):
        if num_bytes > max_bytes:
            raise ValueError(f"{path.name} has {num_bytes} bytes; accepted are at most {max_bytes}")
        return file.read(num_bytes)


def read_start(path: Path, num_bytes: int) -> bytes:
    """Read the first ``num_bytes`` bytes of a regular file, or fewer if it is shorter.

    Raises:
        ValueError: It is not a regular file, or cannot be read.
    """
    with opened(path) as (file, _):
        return file.read(num_bytes)


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file; yields the file and its size in bytes.

    Raises:
        ValueError: It is not a regular file, or cannot be opened; or an `OSError` of the context.
    """
    try:
        # Without O_NONBLOCK a pipe without a writer would block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path.name} is no regular file")
            yield file, status.st_size
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from error


def parse_json(name: str, content: bytes) -> object:
    """Parse a JSON document.

    Args:
        name: Name of the file in errors.
        content: The document.

    Raises:
        ValueError: It is not valid JSON, or nested deeper than `MAX_JSON_DEPTH`.
    """
    try:
        value: object = json.loads(content)
    except RecursionError:
        raise ValueError(f"{name} is nested deeper than {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise ValueError(f"{name} is nested deeper than {MAX_JSON_DEPTH} levels")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> object:
    """Parse a JSON file.

    Raises:
        ValueError: It is not a regular file of at most ``max_bytes``, or not valid JSON.
    """
    return parse_json(path.name, read_bytes(path, max_bytes))


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []

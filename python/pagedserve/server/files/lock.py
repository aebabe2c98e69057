"""Locks of files and directories that one process at a time may use."""

import fcntl
from pathlib import Path
from typing import BinaryIO

from pagedserve.errors import ConfigError, reason


def lock_directory(path: str) -> BinaryIO:
    """Create a directory, and lock it for this process.

    Args:
        path: Path of the directory.

    Returns:
        The file that holds the lock until it is closed.

    Raises:
        ConfigError: It cannot be created or written, or another process uses it.
    """
    try:
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("ab")
    except (OSError, ValueError) as error:
        raise ConfigError(f"batch_directory: cannot use {path}: {reason(error)}") from error
    try:
        lock_file(file, f"batch_directory: another process uses {path}")
    except ConfigError:
        file.close()
        raise
    return file


def lock_file(file: BinaryIO, refusal: str) -> None:
    """Lock a file for this process until it is closed, where the file system has locks.

    Raises:
        ConfigError: Another process has locked it; the message is ``refusal``.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(refusal) from None
    except OSError:
        pass  # a file system without locks

"""Paths of which reading is refused: a file is replaced by something that is not a regular file."""

import os
from pathlib import Path
from typing import Final

IRREGULAR: Final = ("directory", "pipe", "loop", "device")


def make_irregular(path: Path, kind: str) -> None:
    """Replace a file by one of ``IRREGULAR``."""
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "loop" else "/dev/zero")

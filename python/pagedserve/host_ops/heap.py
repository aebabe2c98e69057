"""Heap of the C library, which keeps freed memory for later."""

import ctypes
from typing import Final

# Only glibc has it; other C libraries keep less freed memory.
_malloc_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_freed_memory() -> None:
    """Return freed memory that the C library retains to the system.

    Blocks of up to 32 MiB, such as tensors, are in its heap, which shrinks only from its end.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)

"""Heap of the C library, which keeps freed memory for later."""

import ctypes
from typing import Final

# Only glibc has them; other C libraries keep less freed memory.
_malloc_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)
_mallopt: Final = getattr(ctypes.CDLL(None), "mallopt", None)
# Since glibc 2.33; its forerunner counts up to 2 GiB.
_mallinfo2: Final = getattr(ctypes.CDLL(None), "mallinfo2", None)
# Parameter of mallopt(3): the number of heaps.
_M_ARENA_MAX: Final = -8


class _HeapInfo(ctypes.Structure):
    """The struct mallinfo2 of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


if _mallinfo2 is not None:
    _mallinfo2.restype = _HeapInfo


def allocated_bytes() -> int:
    """Bytes that all threads have allocated; 0 where the C library does not say."""
    if _mallinfo2 is None:
        return 0
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


def share_one_heap() -> None:
    """Let all threads that start from now on allocate from the heap of the main thread.

    Otherwise each gets a separate one, and of these `return_freed_memory` leaves out the end: up
    to 64 MiB of each.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return freed memory that the C library retains to the system.

    Blocks of up to 32 MiB, such as tensors, are in its heap, which shrinks only from its end.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)

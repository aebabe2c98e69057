"""Memory for large tensors that are read at random, KV pools and weights, and the return of it."""

import ctypes
from math import prod
from typing import Final

import torch
from torch import Tensor

from pagedserve._core.cpu import advise_huge_pages

_HUGE_PAGE: Final = 1 << 21
# Only glibc has it; other C libraries keep less of what is freed.
_malloc_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)


def empty_in_huge_pages(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in host memory, in pages of 2 MiB where the system has them.

    The processor's table of 4 KiB pages is too small for scattered reads of a large tensor, so
    that each block costs a miss; with huge pages it does not.  As in other tensors, what is never
    written takes no memory.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % _HUGE_PAGE
    advise_huge_pages(memory.data_ptr() + first, num_bytes)
    return memory[first : first + num_bytes].view(dtype).view(shape)


def return_freed_memory() -> None:
    """Give the system back what was freed and the C library keeps for later.

    Tensors of up to 32 MiB lie among others in its heap, which shrinks from its end alone.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)

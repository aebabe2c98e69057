"""Memory for large tensors with random access, such as KV pools and weights."""

from math import prod
from typing import Final

import torch
from torch import Tensor

from pagedserve._core.cpu import advise_huge_pages

_HUGE_PAGE: Final = 1 << 21


def empty_in_huge_pages(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialized tensor in host memory, in pages of 2 MiB if available.

    The processor's TLB is too small for 4 KiB pages in random reads of a large tensor, so that each
    block costs a miss; with huge pages it does not.  As in other tensors, unwritten pages take no
    memory.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % _HUGE_PAGE
    advise_huge_pages(memory.data_ptr() + first, num_bytes)
    return memory[first : first + num_bytes].view(dtype).view(shape)

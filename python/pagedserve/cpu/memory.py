"""Memory for what is large and read all over: KV pools and weights."""

from math import prod
from typing import Final

import torch
from torch import Tensor

from pagedserve import _core

_HUGE_PAGE: Final = 1 << 21


def empty_in_huge_pages(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in the host's memory, in pages of 2 MiB where the system has them.

    Scattered reads miss the processor's table of 4 KiB pages at every block; with huge ones they
    do not.  What is never written takes no memory, as in other tensors.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % _HUGE_PAGE
    _core.advise_huge_pages(memory.data_ptr() + first, num_bytes)
    return memory[first : first + num_bytes].view(dtype).view(shape)

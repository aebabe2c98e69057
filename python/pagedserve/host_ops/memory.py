"""Memory for large tensors with random access, such as KV pools and weights."""

from math import prod

import torch
from torch import Tensor

from pagedserve.host_ops.pages import HUGE_PAGE, bytes_in_huge_pages


def empty_in_huge_pages(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialized tensor in host memory, in pages of 2 MiB if available.

    As in other tensors, unwritten pages take no memory.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(bytes_in_huge_pages(num_bytes)).view(dtype).view(shape)

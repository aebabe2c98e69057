"""The slopes of ALiBi (Press et al., "Train short, test long")."""

from functools import cache

import torch
from torch import Tensor


@cache
def alibi_slopes(num_heads: int, device: torch.device, bias_max: float = 8.0) -> Tensor:
    """Float32 ``[H]``.

    A number of heads that is a power of two has a geometric series that ends at 2 to the power of
    ``-bias_max``; another takes every second slope of the next power of two, and what it lacks
    from between those.
    """
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2 ** (-bias_max * head / power) for head in range(1, power + 1)]
    if power != num_heads:
        slopes = [*slopes[1::2], *slopes[::2]][:num_heads]
    return torch.tensor(slopes, dtype=torch.float32, device=device)

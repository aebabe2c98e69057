"""ALiBi slopes (Press et al., "Train short, test long")."""

from functools import cache

import torch
from torch import Tensor


@cache
def alibi_slopes(num_heads: int, device: torch.device, bias_max: float = 8.0) -> Tensor:
    """Slopes of all heads, float32 ``[H]``.

    A power-of-two number of heads has a geometric series that ends at 2 to the power of
    ``-bias_max``; another number has the series of the next lower power of two, and the remaining
    slopes are every second one of the next higher.
    """
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2 ** (-bias_max * head / power) for head in range(1, power + 1)]
    if power != num_heads:
        slopes = [*slopes[1::2], *slopes[::2]][:num_heads]
    return torch.tensor(slopes, dtype=torch.float32, device=device)

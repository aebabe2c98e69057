"""Norms by the root of the mean square, in one pass."""

import numpy as np
import torch
from torch import Tensor, nn

from pagedserve import _core
from pagedserve.attention.cpu import DTYPE_NAMES
from pagedserve.cpu.linears import numbers
from pagedserve.layers.families import norm_epsilon


def norm_weight(norm: nn.Module) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """What such a norm multiplies with; Gemma's stores how much it differs from 1."""
    weight = norm.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"{type(norm).__name__} has no weight")
    return numbers(1.0 + weight.float() if type(norm).__name__.startswith("Gemma") else weight)


class FastNorm(nn.Module):
    """Computes what a model's own norm of this kind computes."""

    def __init__(self, norm: nn.Module) -> None:
        """Take weight and epsilon of ``norm``."""
        super().__init__()
        self._weight = norm_weight(norm)
        self._epsilon = norm_epsilon(norm)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., features]`` to the same."""
        x = x.contiguous()
        output = torch.empty_like(x)
        _core.rms_norm_cpu(
            dtype=DTYPE_NAMES[x.dtype],
            num_rows=x.numel() // len(self._weight),
            x=x.data_ptr(),
            output=output.data_ptr(),
            weight=self._weight,
            epsilon=self._epsilon,
            num_threads=torch.get_num_threads(),
        )
        return output

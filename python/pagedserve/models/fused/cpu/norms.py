"""RMS norms on the CPU, in one pass."""

import numpy as np
import torch
from torch import Tensor, nn

from pagedserve._core.cpu import rms_norm
from pagedserve.host_ops.capabilities import DTYPE_NAMES
from pagedserve.models.fused.cpu.linears import float32_vector
from pagedserve.models.fused.families import norm_epsilon


def norm_weight(norm: nn.Module) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Factor of an RMS norm; Gemma's weight stores the difference from 1."""
    weight = norm.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"{type(norm).__name__} has no weight")
    is_offset = type(norm).__name__.startswith("Gemma")
    return float32_vector(1.0 + weight.float() if is_offset else weight)


class CpuRMSNorm(nn.Module):
    """An RMS norm in one call."""

    def __init__(self, norm: nn.Module) -> None:
        """Copy the weight and epsilon of ``norm``."""
        super().__init__()
        self._weight = norm_weight(norm)
        self._epsilon = norm_epsilon(norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., features]`` to the same."""
        x = x.contiguous()
        output = torch.empty_like(x)
        rms_norm(
            dtype=DTYPE_NAMES[x.dtype],
            num_rows=x.numel() // len(self._weight),
            x=x.data_ptr(),
            output=output.data_ptr(),
            weight=self._weight,
            epsilon=self._epsilon,
            num_threads=torch.get_num_threads(),
        )
        return output

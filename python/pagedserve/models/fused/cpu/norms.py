"""RMS norms on the CPU, in one pass."""

import torch
from torch import Tensor, nn

from pagedserve._core.cpu import rms_norm
from pagedserve.host_ops.capabilities import DTYPE_NAMES
from pagedserve.models.fused.cpu.linears import float32_vector
from pagedserve.models.fused.recognize import norm_epsilon, norm_factor


class CpuRMSNorm(nn.Module):
    """An RMS norm in one call."""

    def __init__(self, norm: nn.Module) -> None:
        """Copy the weight and epsilon of ``norm``."""
        super().__init__()
        self._weight = float32_vector(norm_factor(norm))
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

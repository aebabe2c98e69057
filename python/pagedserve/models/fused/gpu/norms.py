"""RMS norms on a GPU, one launch each.

transformers computes an RMS norm with eight operations.  In a decode step of few rows each of them
costs a launch, and a model of 32 layers has 65 norms.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pagedserve.models.fused.recognize import norm_epsilon


class GpuRMSNorm(nn.Module):
    """An RMS norm, rounded once instead of twice."""

    def __init__(self, norm: Any) -> None:
        """Share the weight of ``norm`` and copy its epsilon."""
        super().__init__()
        self.weight = norm.weight
        self.epsilon = norm_epsilon(norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., features]`` to the same."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)

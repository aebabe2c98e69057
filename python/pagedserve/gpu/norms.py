"""Norms of a model on a GPU, one launch each.

transformers writes a norm by the root of the mean square as eight operations.  In a decode step of
few rows each of them costs what a launch costs, and a model of 32 layers has 65 norms.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pagedserve.layers.families import norm_epsilon


class FusedNorm(nn.Module):
    """Computes what a model's own norm of this kind computes, with one rounding instead of two."""

    def __init__(self, norm: Any) -> None:
        """Share the weight of ``norm``, and take its epsilon."""
        super().__init__()
        self.weight = norm.weight
        self.epsilon = norm_epsilon(norm)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., features]`` to the same."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)

"""Norms of a model on a GPU, one launch each.

transformers writes a norm by the root of the mean square as eight operations.  In a decode step of
few rows each of them costs what a launch costs, and a model of 32 layers has 65 norms.
"""

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

_TRIAL_ROWS: Final = 8


class FusedNorm(nn.Module):
    """Computes what a model's own norm of this kind computes, with one rounding instead of two."""

    def __init__(self, norm: Any) -> None:
        """Share the weight of ``norm``, and take its epsilon."""
        super().__init__()
        self.weight = norm.weight
        self._epsilon = _epsilon(norm)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., features]`` to the same."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self._epsilon)


@torch.inference_mode()
def exchange_norms(model: nn.Module) -> int:
    """Exchange the norms of a loaded model, each after a comparison with what it replaces.

    Args:
        model: of transformers, changed in place.

    Returns:
        How many were exchanged.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _is_norm(child)
    ]
    num_exchanged = 0
    for parent, name, norm in places:
        fused = FusedNorm(norm)
        if _agree(norm, fused):
            setattr(parent, name, fused)
            num_exchanged += 1
    return num_exchanged


def _is_norm(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(weight, Tensor)
        and weight.dim() == 1
        and isinstance(_epsilon(module), float)
        and len(inspect.signature(module.forward).parameters) == 1
    )


def _epsilon(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _agree(norm: nn.Module, fused: FusedNorm) -> bool:
    """Whether both give the same, but for roundings."""
    weight = fused.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TRIAL_ROWS, len(weight), generator=generator).to(weight.device, weight.dtype)
    found, expected = fused(x), norm(x)
    if found.dtype != expected.dtype:
        return False
    largest = float(expected.abs().max())
    difference = float((found.float() - expected.float()).abs().max())
    return difference <= 4 * torch.finfo(weight.dtype).eps * max(largest, 1e-3)

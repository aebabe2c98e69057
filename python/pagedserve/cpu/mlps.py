"""Gated feed-forward layers: two products instead of three, the activation inside the first."""

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from pagedserve.config import Quantization
from pagedserve.cpu.linears import PANEL_FEATURES, Gate, can_pack, multiply, pack, pack_gated

_GATES: Final[dict[type, Gate]] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUTanh: "gelu_tanh",
}


def gate_of(mlp: Any) -> Gate | None:
    """The activation of ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``; None for others."""
    linears = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(one) is nn.Linear and can_pack(one.weight) for one in linears):
        return None
    if mlp.gate_proj.bias is not None or mlp.up_proj.bias is not None:
        return None
    if mlp.gate_proj.out_features % (PANEL_FEATURES // 2):
        return None
    return _GATES.get(type(getattr(mlp, "act_fn", None)))


class GatedMLP(nn.Module):
    """Computes what a model's own gated layers compute."""

    def __init__(self, mlp: Any, gate: Gate, quantization: Quantization | None = None) -> None:
        """Pack the weights of ``mlp``, whose `gate_of` this is."""
        super().__init__()
        self._sizes = mlp.down_proj.in_features, mlp.down_proj.out_features
        self.packed = (
            pack_gated(mlp.gate_proj.weight, mlp.up_proj.weight, gate, quantization),
            pack(mlp.down_proj.weight, mlp.down_proj.bias, quantization=quantization),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[..., features]`` to the same."""
        rows = x.reshape(-1, x.shape[-1])
        inner_size, size = self._sizes
        inner = torch.empty(len(rows), inner_size, dtype=x.dtype)
        output = torch.empty(len(rows), size, dtype=x.dtype)
        multiply(rows, self.packed[0], inner)
        return multiply(inner, self.packed[1], output).view(x.shape)

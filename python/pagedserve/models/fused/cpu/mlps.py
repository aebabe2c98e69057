"""Gated MLPs on the CPU: two products instead of three, with the activation in the first."""

from typing import Any

import torch
from torch import Tensor

from pagedserve.config.precision import Quantization
from pagedserve.models.families.record import Gate
from pagedserve.models.fused.cpu.linears import (
    PANEL_FEATURES,
    can_pack,
    multiply,
    pack,
    pack_gated,
)
from pagedserve.models.fused.parts import FusedModule, mlp_parts
from pagedserve.models.fused.recognize import gate_of, mlp_linears
from pagedserve.parallel.modules import group_of, own_linear
from pagedserve.parallel.shards import peaks_of


def packable_gate_of(mlp: Any) -> Gate | None:
    """Gate of an MLP whose weights can be packed; None for other modules."""
    linears = mlp_linears(mlp)
    if linears is None or not all(can_pack(linear.weight) for linear in linears):
        return None
    return None if mlp.gate_proj.out_features % (PANEL_FEATURES // 2) else gate_of(mlp)


class PackedGatedMLP(FusedModule):
    """A gated MLP with packed weights."""

    def __init__(self, mlp: Any, gate: Gate, quantization: Quantization | None = None) -> None:
        """Pack the weights of ``mlp``; ``gate`` is its `packable_gate_of`."""
        super().__init__()
        down = own_linear(mlp.down_proj)
        self._group = group_of(mlp.down_proj)
        self._sizes = down.in_features, down.out_features
        self.packed = (
            pack_gated(mlp.gate_proj.weight, mlp.up_proj.weight, gate, quantization),
            pack(down.weight, down.bias, quantization=quantization, peaks=peaks_of(down)),
        )
        self.parts = mlp_parts(mlp, *self.packed)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., features]`` to the same."""
        rows = x.reshape(-1, x.shape[-1])
        inner_size, size = self._sizes
        inner = torch.empty(len(rows), inner_size, dtype=x.dtype)
        output = torch.empty(len(rows), size, dtype=x.dtype)
        multiply(rows, self.packed[0], inner)
        multiply(inner, self.packed[1], output)
        if self._group is not None:
            self._group.all_reduce(output)
        return output.view(x.shape)

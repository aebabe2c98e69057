"""``FusedModule``: a module that replaces linear layers, and the parts of those known."""

from typing import Any

from torch import nn

from pagedserve.models.fused.parts import FusedPart, parts_of
from pagedserve.parallel.modules import own_linear


class FusedModule(nn.Module):
    """A module that replaces some linear layers.

    Attributes:
        parts: those layers, by their former names below the module; those of a home in the order of
            their features.
    """

    parts: dict[str, FusedPart]


def layer_parts(layer: Any, qkv: Any, output: Any, gate_up: Any, down: Any) -> dict[str, FusedPart]:
    """Linear layers of a decoder layer of a known family, by the homes of its four products."""
    attention = layer.self_attn
    inputs = {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")}
    parts = parts_of(qkv, inputs) | parts_of(output, {"o_proj": own_linear(attention.o_proj)})
    return {f"self_attn.{name}": part for name, part in parts.items()} | {
        f"mlp.{name}": part for name, part in mlp_parts(layer.mlp, gate_up, down).items()
    }


def mlp_parts(mlp: Any, gate_up: Any, down: Any) -> dict[str, FusedPart]:
    """Linear layers of a gated MLP, by name."""
    gated = {"gate_proj": mlp.gate_proj, "up_proj": mlp.up_proj}
    return parts_of(gate_up, gated) | parts_of(down, {"down_proj": own_linear(mlp.down_proj)})

"""The linear layers that a replacement contains, for code that modifies one of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from pagedserve.parallel.modules import own_linear


class FusedPart(NamedTuple):
    """A linear layer among those with fused weights.

    Attributes:
        home: packed weights, or torch's linear layer that computes all of them.
        first_feature: its first feature in ``home``; gates come before ups.
        in_features: number of its input features.
        out_features: number of its output features.
    """

    home: Any
    first_feature: int
    in_features: int
    out_features: int


class FusedModule(nn.Module):
    """A module that replaces some linear layers.

    Attributes:
        parts: those layers, by their former names below the module; those of a home in the order of
            their features.
    """

    parts: dict[str, FusedPart]


def parts_of(home: Any, linears: Mapping[str, Any]) -> dict[str, FusedPart]:
    """Linear layers by name, in the order in which they were fused."""
    parts, first = {}, 0
    for name, linear in linears.items():
        parts[name] = FusedPart(home, first, linear.in_features, linear.out_features)
        first += linear.out_features
    return parts


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

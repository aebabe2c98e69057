"""The linear layers that a replacement contains, for code that modifies one of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple


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


def parts_of(home: Any, linears: Mapping[str, Any]) -> dict[str, FusedPart]:
    """Linear layers by name, in the order in which they were fused."""
    parts, first = {}, 0
    for name, linear in linears.items():
        parts[name] = FusedPart(home, first, linear.in_features, linear.out_features)
        first += linear.out_features
    return parts

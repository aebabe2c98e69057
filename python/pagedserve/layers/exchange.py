"""Puts modules in the places of a model's own, each after a comparison."""

from collections.abc import Callable
from typing import Any

from torch import nn


def exchange_each(
    model: nn.Module,
    is_wanted: Callable[[Any], bool],
    make: Callable[[Any], nn.Module],
    agree: Callable[[Any, Any], bool],
) -> int:
    """Exchange every module of a kind that agrees with what is made of it.

    Args:
        model: changed in place.
        is_wanted: whether a module is of the kind.
        make: makes what may take its place.
        agree: compares the two.

    Returns:
        How many were exchanged.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_wanted(child)
    ]
    num_exchanged = 0
    for parent, name in places:  # without its module: nothing else keeps a replaced one in memory
        made = make(getattr(parent, name))
        if agree(getattr(parent, name), made):
            setattr(parent, name, made)
            num_exchanged += 1
    return num_exchanged

"""Replacement of a model's modules in place, each after a comparison with the original."""

from collections.abc import Callable
from typing import Any

from torch import nn

from pagedserve.host_ops.heap import return_freed_memory
from pagedserve.models.load.bars import progress


def replace_modules(
    model: nn.Module,
    is_replaceable: Callable[[Any], bool],
    make: Callable[[Any], nn.Module],
    agree: Callable[[Any, Any], bool],
    everywhere: Callable[[bool], bool] = bool,
) -> int:
    """Replace every module of a type whose replacement gives the same result.

    Args:
        model: model, modified in place.
        is_replaceable: whether a module is of the type.
        make: creates the replacement of a module.
        agree: compares a module with its replacement.
        everywhere: all-reduce of a condition over the ranks that share the model.

    Returns:
        Number of replaced modules.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if everywhere(is_replaceable(child))
    ]
    num_replaced = 0
    # Names instead of modules: no other reference may keep a replaced module in memory.
    for parent, name in progress(places, "replacing modules"):
        replacement = make(getattr(parent, name))
        if everywhere(agree(getattr(parent, name), replacement)):
            setattr(parent, name, replacement)
            return_freed_memory()
            num_replaced += 1
    return num_replaced

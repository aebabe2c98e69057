"""Replaces modules of a model in place, each after a comparison with its replacement."""

from collections.abc import Callable
from typing import Any

from torch import nn

from pagedserve.host_ops.memory import return_freed_memory
from pagedserve.models.progress import progress


def replace_modules(
    model: nn.Module,
    is_wanted: Callable[[Any], bool],
    make: Callable[[Any], nn.Module],
    agree: Callable[[Any, Any], bool],
    everywhere: Callable[[bool], bool] = bool,
) -> int:
    """Replace every module of a kind whose replacement computes the same.

    Args:
        model: changed in place.
        is_wanted: whether a module is of the kind.
        make: makes the replacement of a module.
        agree: compares a module with its replacement.
        everywhere: whether something is true on all ranks that share the model.

    Returns:
        How many were replaced.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if everywhere(is_wanted(child))
    ]
    num_replaced = 0
    # Places and not modules: nothing else may keep a replaced module in memory.
    for parent, name in progress(places, "replacing modules"):
        replacement = make(getattr(parent, name))
        if everywhere(agree(getattr(parent, name), replacement)):
            setattr(parent, name, replacement)
            return_freed_memory()
            num_replaced += 1
    return num_replaced

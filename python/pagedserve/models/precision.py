"""Temporary float32 arithmetic in a model of half precision.

Half precision hides errors that a check must find: its rounding errors are larger than that of a
lost state.  The weights of each module are float32 only while it computes, so this takes the memory
of one module instead of a second model, unless the model has mixers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pagedserve.models.mixers import mixing_modules


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """A context in which every module's weights are float32 while it computes."""
    handles = []
    # Models with mixers read weights, and their dtypes, of modules that they do not call.
    is_one = bool(mixing_modules(model))
    for module in [model] if is_one else model.modules():
        narrow = [
            parameter
            for parameter in module.parameters(recurse=is_one)
            if parameter.is_floating_point() and parameter.dtype != torch.float32
        ]
        if narrow:
            stack: list[list[Tensor]] = []  # a module may be called recursively
            handles += [
                module.register_forward_pre_hook(partial(_widen, narrow, stack)),
                module.register_forward_hook(partial(_restore, narrow, stack), always_call=True),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _widen(parameters: list[nn.Parameter], stack: list[list[Tensor]], *_: Any) -> None:
    stack.append([parameter.data for parameter in parameters])
    for parameter in parameters:
        parameter.data = parameter.data.float()


def _restore(parameters: list[nn.Parameter], stack: list[list[Tensor]], *_: Any) -> None:
    for parameter, data in zip(parameters, stack.pop(), strict=True):
        parameter.data = data

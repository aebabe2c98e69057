"""Exchanges modules of one loaded model on a GPU, each after a comparison with what it replaces."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pagedserve.config import AttentionBackend
from pagedserve.gpu.norms import FusedNorm
from pagedserve.layers.families import is_norm
from pagedserve.layers.trial import is_close, layers_agree, random_numbers


@torch.inference_mode()
def exchange(model: nn.Module, backend: AttentionBackend) -> str:
    """Exchange decoder layers and then what norms are left, in place.

    Args:
        model: of transformers, with its own modules.
        backend: who attends; whole layers are exchanged with "triton".

    Returns:
        How many modules of which kind were exchanged, for people.
    """
    swapped: Counter[str] = Counter()
    if backend == "triton":
        swapped["decoder layers"] = _fuse_layers(model)
    swapped["norms"] = _fuse_norms(model)
    return ", ".join(f"{kind} {count}" for kind, count in swapped.items() if count) or "none"


def _fuse_layers(model: nn.Module) -> int:
    from pagedserve.gpu.layers import FusedLayer, can_fuse  # imports triton

    num_fused = 0
    for parent, name in _places(model, can_fuse):
        fused = FusedLayer(getattr(parent, name))
        if layers_agree(getattr(parent, name), fused, "triton"):
            setattr(parent, name, fused)
            num_fused += 1
    return num_fused


def _fuse_norms(model: nn.Module) -> int:
    num_fused = 0
    for parent, name in _places(model, is_norm):
        norm = getattr(parent, name)
        fused = FusedNorm(norm)
        if _agree(norm, fused):
            setattr(parent, name, fused)
            num_fused += 1
    return num_fused


def _places(model: nn.Module, is_wanted: Callable[[Any], bool]) -> list[tuple[nn.Module, str]]:
    """Where such modules are, without them: nothing else keeps a replaced one in memory."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_wanted(child)
    ]


def _agree(norm: nn.Module, fused: FusedNorm) -> bool:
    """Whether both give the same, but for roundings."""
    weight = fused.weight
    x = random_numbers(8, len(weight)).to(weight.device, weight.dtype)
    found, expected = fused(x), norm(x)
    is_alike = found.dtype == expected.dtype
    return is_alike and is_close(found, expected, num_terms=len(weight), num_parts=1)

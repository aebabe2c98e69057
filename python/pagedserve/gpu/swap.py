"""Exchanges modules of one loaded model on a GPU, each after a comparison with what it replaces."""

from collections import Counter
from functools import partial

import torch
from torch import nn

from pagedserve.config import AttentionBackend
from pagedserve.gpu.norms import FusedNorm
from pagedserve.layers.exchange import exchange_each
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
    swapped["norms"] = exchange_each(model, is_norm, FusedNorm, _agree)
    return ", ".join(f"{kind} {count}" for kind, count in swapped.items() if count) or "none"


def _fuse_layers(model: nn.Module) -> int:
    from pagedserve.gpu.layers import FusedLayer, can_fuse  # imports triton

    return exchange_each(model, can_fuse, FusedLayer, partial(layers_agree, backend="triton"))


def _agree(norm: nn.Module, fused: FusedNorm) -> bool:
    """Whether both give the same, but for roundings."""
    weight = fused.weight
    x = random_numbers(8, len(weight)).to(weight.device, weight.dtype)
    found, expected = fused(x), norm(x)
    is_alike = found.dtype == expected.dtype
    return is_alike and is_close(found, expected, num_terms=len(weight), num_parts=1)

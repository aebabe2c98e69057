"""Shards of linear layers and embeddings: which weights of the whole module a rank has."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from pagedserve.parallel.group import RankGroup
from pagedserve.parallel.modules import Gathered, Reduced, VocabEmbedding

_NONE: Final[Mapping[str, "Shard"]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a module.

    Attributes:
        in_features: Input features of the whole module; for an embedding its tokens.
        out_features: Output features of the whole module.
        inputs: Those of this rank.
        outputs: Those of this rank.
    """

    in_features: int
    out_features: int
    inputs: slice
    outputs: slice


def keep_shards(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Record the shards of a model by the names of its modules."""
    kept: Any = model
    kept.pagedserve_shards = dict(shards)


def shards_of(model: nn.Module) -> Mapping[str, Shard]:
    """Recorded shards by the names of modules; empty for a whole model."""
    return getattr(model, "pagedserve_shards", _NONE)


def keep_peaks(module: Any, group: RankGroup) -> None:
    """Record the largest magnitude of each output feature's weights over all ranks."""
    peaks = module.weight.detach().abs().amax(dim=1).float().contiguous()
    module.peaks = torch.stack(group.all_gather(peaks)).amax(dim=0)


def peaks_of(module: nn.Module) -> Tensor | None:
    """Recorded magnitudes, float32 ``[N]``; None if no other rank has weights of its features."""
    return getattr(module, "peaks", None)


def inner_of(module: Any) -> Any:
    """This rank's module, if a module with a collective wraps it; else the module itself."""
    return module.inner if isinstance(module, Gathered | Reduced | VocabEmbedding) else module

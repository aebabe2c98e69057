"""Modules with a collective operation over the ranks.

Invariant: the result is bitwise equal on all ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pagedserve.parallel.group import RankGroup


class Reduced(nn.Module):
    """Sum of a module's output over the ranks; only rank 0 adds a bias.

    Attributes:
        inner: Module with this rank's shard.
    """

    def __init__(self, inner: nn.Module, group: RankGroup, part: slice | None = None) -> None:
        """Wrap a module.

        Args:
            inner: Module of this rank.
            group: Group of all ranks.
            part: Slice of the input's features that it takes; None if the input has no others.
        """
        super().__init__()
        if group.rank and getattr(inner, "bias", None) is not None:
            inner.register_parameter("bias", None)
        self.inner = inner
        self.group = group
        self._part = part

    @property
    def takes_part(self) -> bool:
        """Whether the input has features of other ranks, too."""
        return self._part is not None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the inner module, and sum its output over the ranks."""
        x = x if self._part is None else x[..., self._part]
        output: Tensor = self.inner(x, *args, **kwargs).contiguous()
        self.group.all_reduce(output)
        return output


class Gathered(nn.Module):
    """Concatenation of the output features of the ranks' linear layers.

    Attributes:
        inner: Layer with this rank's features, fewer on the last rank if not divisible.
    """

    def __init__(self, inner: nn.Linear, group: RankGroup) -> None:
        """Wrap a layer; gathers the numbers of features of the other ranks."""
        super().__init__()
        self.inner = inner
        self._group = group
        self._sizes = group.gather(inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., F]`` to ``[..., all features]``."""
        output = self.inner(x)
        missing = max(self._sizes) - output.shape[-1]
        parts = self._group.all_gather(nn.functional.pad(output, (0, missing)).contiguous())
        pairs = zip(parts, self._sizes, strict=True)
        return torch.cat([part[..., :size] for part, size in pairs], -1)


class VocabEmbedding(nn.Module):
    """Embedding whose tokens are split among the ranks.

    Attributes:
        inner: Embedding with this rank's tokens, scaled if the model does.
        num_embeddings: Number of tokens of all ranks.
    """

    def __init__(self, inner: nn.Embedding, group: RankGroup) -> None:
        """Wrap an embedding; gathers the numbers of tokens of the other ranks."""
        super().__init__()
        self.inner = inner
        self._group = group
        sizes = group.gather(len(inner.weight))
        self._first = sum(sizes[: group.rank])
        self.num_embeddings = sum(sizes)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids ``[...]`` to ``[..., F]``."""
        local = ids - self._first
        is_elsewhere = (local < 0) | (local >= len(self.inner.weight))
        output: Tensor = self.inner(local.masked_fill(is_elsewhere, 0))
        output = output.masked_fill(is_elsewhere[..., None], 0).contiguous()
        self._group.all_reduce(output)
        return output


def own_linear(module: Any) -> Any:
    """This rank's linear layer if it is sharded; else the module itself."""
    return module.inner if isinstance(module, Reduced) and not module.takes_part else module


def group_of(module: Any) -> RankGroup | None:
    """The ranks that sum a module's output; None if it is not summed."""
    return module.group if isinstance(module, Reduced) else None

"""Modules in which the results of ranks meet.

Invariant: each gives every rank the same numbers, to the last bit.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pagedserve.parallel.group import RankGroup


class Reduced(nn.Module):
    """The sum over the ranks of what a module gives, which only rank 0 adds a bias to.

    Attributes:
        inner: Computes this rank's part.
    """

    def __init__(self, inner: nn.Module, group: RankGroup, part: slice | None = None) -> None:
        """Wrap a module.

        Args:
            inner: Of this rank.
            group: Of all.
            part: Of the input's features those that it takes; None where the input has no others.
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
        """What the inner module takes, to what the model's own gives."""
        x = x if self._part is None else x[..., self._part]
        output: Tensor = self.inner(x, *args, **kwargs).contiguous()
        self.group.all_reduce(output)
        return output


class Gathered(nn.Module):
    """The features that the ranks' linear layers give, side by side.

    Attributes:
        inner: Computes this rank's, which are fewer on the last one where they do not divide.
    """

    def __init__(self, inner: nn.Linear, group: RankGroup) -> None:
        """Wrap a layer; asks the others how many features they have."""
        super().__init__()
        self.inner = inner
        self._group = group
        self._sizes = group.gather(inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., F]`` to ``[..., all features]``."""
        output = self.inner(x)
        missing = max(self._sizes) - output.shape[-1]
        parts = self._group.all_gather(nn.functional.pad(output, (0, missing)).contiguous())
        pairs = zip(parts, self._sizes, strict=True)
        return torch.cat([part[..., :size] for part, size in pairs], -1)


class VocabEmbedding(nn.Module):
    """An embedding whose tokens are split among the ranks.

    Attributes:
        inner: Has this rank's tokens, and scales them where the model does.
        num_embeddings: Of all ranks.
    """

    def __init__(self, inner: nn.Embedding, group: RankGroup) -> None:
        """Wrap an embedding; asks the others how many tokens they have."""
        super().__init__()
        self.inner = inner
        self._group = group
        sizes = group.gather(len(inner.weight))
        self._first = sum(sizes[: group.rank])
        self.num_embeddings = sum(sizes)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids ``[...]`` to ``[..., F]``."""
        local = ids - self._first
        is_elsewhere = (local < 0) | (local >= len(self.inner.weight))
        output: Tensor = self.inner(local.masked_fill(is_elsewhere, 0))
        output = output.masked_fill(is_elsewhere[..., None], 0).contiguous()
        self._group.all_reduce(output)
        return output


def own_linear(module: Any) -> Any:
    """This rank's linear layer where several have parts of one; else the module itself."""
    return module.inner if isinstance(module, Reduced) and not module.takes_part else module


def group_of(module: Any) -> RankGroup | None:
    """The ranks that add up what a module gives; None where it gives all."""
    return module.group if isinstance(module, Reduced) else None

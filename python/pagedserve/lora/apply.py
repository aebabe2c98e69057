"""Adapters of a loaded model: which of its modules can have them, in which slots they lie."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pagedserve.errors import StepError
from pagedserve.lora.modules import (
    AdaptedEmbedding,
    AdaptedHead,
    AdaptedLinear,
    AdaptedModules,
    AdaptedPacked,
)
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapters import AdapterRows, StepAdapters, adapting
from pagedserve.models.fused.cpu.linears import PackedEmbedding, PackedLinear
from pagedserve.models.fused.parts import FusedModule, FusedPart


class AdapterModules:
    """The modules of a model that can have adapters.

    Attributes:
        targets: features in and out of each, by its name in the model as transformers builds it.
    """

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_rank: int) -> None:
        """Hook into a model, whose modules have been replaced already.

        Args:
            model: changed in place.
            num_slots: adapters that can lie ready at once.
            max_rank: the largest rank of an adapter.
        """
        self._device = model.device
        self._num_slots = num_slots
        self._max_rank = max_rank
        self._places = list(_places(model, num_slots))
        self.targets: dict[str, tuple[int, int]] = {}
        for place in self._places:
            self.targets |= place.targets

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Let a slot hold an adapter and nothing else.

        Args:
            slot: below ``num_slots``.
            weights: by the names of ``targets``; none empties the slot.

        Raises:
            StepError: if there is no such slot or module, or weights do not fit it.
        """
        if not 0 <= slot < self._num_slots:
            raise StepError(f"slot must be below {self._num_slots}; got {slot}")
        for name, pair in weights.items():
            self._check(name, pair)
        for place in self._places:
            place.load(slot, {name: weights[name] for name in place.targets if name in weights})

    @contextmanager
    def step(
        self, token_slots: NDArray[np.int32], samples: NDArray[np.int32] | None = None
    ) -> Iterator[None]:
        """Let one forward have adapters.

        Args:
            token_slots: int32 ``[T]``, the slot of each token of the flat batch; -1 for the base
                model alone.
            samples: int32 ``[N]``, positions in T whose logits are wanted; None wants all.
        """
        if not (token_slots >= 0).any():
            yield
            return
        if int(token_slots.max()) >= self._num_slots:
            raise StepError(f"token_slots must be below {self._num_slots}; got {token_slots.max()}")
        tokens = AdapterRows(token_slots, self._device)
        if samples is None:
            step = StepAdapters(tokens, tokens)
        else:
            step = StepAdapters(tokens, AdapterRows(token_slots[samples], self._device))
        with adapting(step):
            yield

    def _check(self, name: str, weights: LoraWeights) -> None:
        if name not in self.targets:
            raise StepError(f"{name!r} is no module that can have an adapter")
        in_features, out_features = self.targets[name]
        a, b, rank = weights.a, weights.b, len(weights.a)
        if a.shape != (rank, in_features) or b.shape != (out_features, rank):
            raise StepError(
                f"the adapter of {name} must be ({rank}, {in_features}) and ({out_features}, "
                f"{rank}); got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        if rank > self._max_rank:
            raise StepError(
                f"the rank of the adapter of {name} must be at most {self._max_rank}; got {rank}"
            )


def _places(model: PreTrainedModel, num_slots: int) -> Iterator[AdaptedModules]:
    """Where adapters go.  Experts are left out: they see some of the tokens, in another order."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    hook: dict[str, Any] = {"num_slots": num_slots, "device": model.device}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        part = _part(module)
        if module in inside or ".experts." in name:
            continue
        if module is embedding and isinstance(module, nn.Embedding | PackedEmbedding):
            part = FusedPart(module, 0, module.num_embeddings, module.embedding_dim)
            yield AdaptedEmbedding(module, {name: part}, **hook)
        elif module is head and part is not None:
            yield AdaptedHead(module, {name: part}, **hook)
        elif isinstance(module, FusedModule):
            inside |= set(module.modules())
            for parts in _homes(name, module):
                home = next(iter(parts.values())).home
                is_packed = not isinstance(home, nn.Module)
                yield AdaptedPacked(parts) if is_packed else AdaptedLinear(home, parts, **hook)
        elif part is not None:
            yield AdaptedLinear(module, {name: part}, **hook)


def _homes(name: str, module: FusedModule) -> Iterator[dict[str, FusedPart]]:
    """The parts of a module by their names in the model, those of each home together."""
    named = [(f"{name}.{below}".rstrip("."), part) for below, part in module.parts.items()]
    for _, together in groupby(named, key=lambda pair: id(pair[1].home)):
        yield dict(together)


def _part(module: Any) -> FusedPart | None:
    """A linear layer as a part that is all of its home; None for other modules."""
    if isinstance(module, nn.Linear | PackedLinear):
        return FusedPart(module, 0, module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        return FusedPart(module, 0, module.nx, module.nf)
    return None

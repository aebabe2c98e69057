"""Adapters of a loaded model: the modules that can have them, and their slots."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pagedserve.errors import StepError
from pagedserve.lora.modules import AdaptedEmbedding, AdaptedHead, AdaptedLinear
from pagedserve.lora.places import AdaptedModules, AdaptedPacked, AdapterPlaces
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapters import AdapterRows, StepAdapters
from pagedserve.models.fused.cpu.modules import PackedEmbedding, PackedLinear
from pagedserve.models.fused.modules import FusedModule
from pagedserve.models.fused.parts import FusedPart
from pagedserve.models.loader import LoadedModel
from pagedserve.models.mixers import mixing_modules
from pagedserve.parallel.shards import inner_of, shards_of

# Hooks into a module, from its parts by their names in the model.
Hook: TypeAlias = Callable[[nn.Module, Mapping[str, FusedPart]], AdaptedModules]


class AdapterModules:
    """The modules of a model that can have adapters.

    Attributes:
        targets: features in and out of each, by its name in transformers' model; those of the
            whole model if ranks share it.
    """

    def __init__(self, loaded: LoadedModel, *, num_slots: int, max_rank: int) -> None:
        """Hook into a model, whose modules have been replaced already.

        Args:
            loaded: model; its modules are modified in place.
            num_slots: number of adapters that are loaded at once.
            max_rank: maximum rank of an adapter.
        """
        self._shards = shards_of(loaded.model)
        places = list(_places(loaded.model, _hooks(loaded, num_slots, max_rank)))
        self._places = AdapterPlaces(places, num_slots)
        self.targets = self._places.targets.copy()
        for name, shard in self._shards.items():
            if name in self.targets:
                self.targets[name] = shard.in_features, shard.out_features

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Load an adapter into a slot, replacing its contents.

        Args:
            slot: below ``num_slots``.
            weights: weights by the names of ``targets``, with matching features and a rank of at
                most ``max_rank``; an empty mapping clears the slot.

        Raises:
            StepError: there is no such slot.
        """
        self._places.load(slot, {name: self._own(name, pair) for name, pair in weights.items()})

    def _own(self, name: str, weights: LoraWeights) -> LoraWeights:
        """What this rank needs of a module's weights."""
        shard = self._shards.get(name)
        if shard is None:
            return weights
        return LoraWeights(weights.a[:, shard.inputs], weights.b[shard.outputs])

    def of_step(
        self, tokens: AdapterRows, samples: AdapterRows | None = None
    ) -> StepAdapters | None:
        """Adapters of one forward pass; None if no row has one.

        Args:
            tokens: adapters of the flat batch.
            samples: adapters of the tokens that need logits; None is all.

        Raises:
            StepError: there is no such slot.
        """
        if len(tokens.slots) == 0:
            return None
        num_slots = self._places.num_slots
        if tokens.slots[-1] >= num_slots:
            raise StepError(f"slots must be below {num_slots}; got {tokens.slots[-1]}")
        return StepAdapters(tokens, tokens if samples is None else samples)


class _Hooks(NamedTuple):
    """Hooks for the types of torch modules."""

    linear: Hook
    head: Hook
    embedding: Hook


def _hooks(loaded: LoadedModel, num_slots: int, max_rank: int) -> _Hooks:
    """Kernels where CUDA graphs may record them, else torch's operations."""
    room: dict[str, Any] = {"num_slots": num_slots, "device": loaded.device}
    if not loaded.attention_backend.can_record_graphs:
        kinds: tuple[Any, ...] = (AdaptedLinear, AdaptedHead, AdaptedEmbedding)
    else:
        from pagedserve.lora.triton import TritonEmbedding, TritonHead, TritonLinear

        kinds = (TritonLinear, TritonHead, TritonEmbedding)
        room |= {"max_rank": max_rank, "dtype": loaded.dtype}
    return _Hooks(*(partial(kind, **room) for kind in kinds))


def _places(model: PreTrainedModel, hooks: _Hooks) -> Iterator[AdaptedModules]:
    """The modules that can have adapters.

    Excludes experts and mixers: they process a subset of the tokens, in another order.
    """
    head, embedding = map(inner_of, (model.get_output_embeddings(), model.get_input_embeddings()))
    inside: set[nn.Module] = {part for mixer in mixing_modules(model) for part in mixer.modules()}
    for name, module in _named_modules(model):
        part = _part(module)
        if module in inside or ".experts." in name:
            continue
        if module is embedding and isinstance(module, nn.Embedding | PackedEmbedding):
            part = FusedPart(module, 0, module.num_embeddings, module.embedding_dim)
            yield hooks.embedding(module, {name: part})
        elif module is head and part is not None:
            yield hooks.head(module, {name: part})
        elif isinstance(module, FusedModule):
            inside |= set(module.modules())
            for parts in _homes(name, module):
                home = next(iter(parts.values())).home
                is_packed = not isinstance(home, nn.Module)
                yield AdaptedPacked(parts) if is_packed else hooks.linear(home, parts)
        elif part is not None:
            yield hooks.linear(module, {name: part})


def _named_modules(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The modules by their names in transformers' model: a rank's without what wraps them."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent = name.rpartition(".")[0]
        is_inner = parent in modules and inner_of(modules[parent]) is module
        yield parent if is_inner else name, module


def _homes(name: str, module: FusedModule) -> Iterator[dict[str, FusedPart]]:
    """The parts of a module by their names in the model, grouped by their packed weights."""
    named = [(f"{name}.{below}".rstrip("."), part) for below, part in module.parts.items()]
    for _, together in groupby(named, key=lambda pair: id(pair[1].home)):
        yield dict(together)


def _part(module: Any) -> FusedPart | None:
    """A linear layer as a part with separate weights; None for other modules."""
    if isinstance(module, nn.Linear | PackedLinear):
        return FusedPart(module, 0, module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        return FusedPart(module, 0, module.nx, module.nf)
    return None

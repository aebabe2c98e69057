"""Adapters of a native model: the modules that can have them, and those that are loaded."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pagedserve._core.cpu import PackedWeights
from pagedserve.config import EngineArgs
from pagedserve.executor.adapter_slots import AdapterSlots
from pagedserve.lora.host import HostAdapters
from pagedserve.lora.places import AdaptedModules, AdaptedPacked, AdapterPlaces
from pagedserve.models.families.record import LayerPart
from pagedserve.models.fused.parts import parts_of
from pagedserve.native.model import NativeModel, Product
from pagedserve.native.tensor_names import safetensors_names, shapes_of

# Layers that each product of a decoder layer computes, in the order of their features.
_PARTS: Final[dict[Product, tuple[LayerPart, ...]]] = {
    "qkv": ("query", "key", "value"),
    "output": ("output",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


class NativeAdapters:
    """Adapters in host memory, and those in the slots of the model's layers."""

    def __init__(self, args: EngineArgs, model: NativeModel) -> None:
        """Start empty; without ``enable_lora`` no module can have adapters."""
        places = list(_places(model)) if args.enable_lora else []
        self._places = AdapterPlaces(places, args.max_loras)
        self._slots = AdapterSlots(args, self._places.targets)

    @property
    def host(self) -> HostAdapters:
        """Adapters in host memory."""
        return self._slots.host

    def load(self, adapters: Sequence[tuple[int, int]]) -> None:
        """Load the adapters of a step, as (ordinal, slot), into the model."""
        for slot, weights in self._slots.load(adapters):
            self._places.load(slot, weights)


class _Features(NamedTuple):
    """Sizes of a linear layer."""

    out_features: int
    in_features: int


def _places(model: NativeModel) -> Iterator[AdaptedModules]:
    """All linear layers, the embedding and the head, by their names in transformers' model."""
    config = model.config
    names = safetensors_names(config)
    shapes = shapes_of(config, names)

    def packed(home: PackedWeights, *weights: str) -> AdaptedPacked:
        linears = {name.removesuffix(".weight"): _Features(*shapes[name]) for name in weights}
        return AdaptedPacked(parts_of(home, linears))

    yield model.embedding
    for layer, weights in enumerate(model.layers):
        for product, home in weights.products.items():
            yield packed(home, *(names.of_layer(layer, part) for part in _PARTS[product]))
    shapes[names.head] = shapes[names.embedding]
    if model.head is not None:
        yield packed(model.head, names.head)

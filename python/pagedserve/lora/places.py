"""The modules of a model that can have adapters, and the slots into which adapters are loaded."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pagedserve.errors import StepError
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.fused.parts import FusedPart


class AdaptedModules(Protocol):
    """A group of modules whose adapters are loaded together."""

    @property
    def targets(self) -> Mapping[str, tuple[int, int]]:
        """Features in and out of each, by name."""

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Load these weights, by name, into a slot, replacing its contents."""


class AdaptedPacked:
    """Linear layers with shared packed weights, whose product adds adapters."""

    def __init__(self, parts: Mapping[str, FusedPart]) -> None:
        """Store layers by their names in the model, in the order of their features."""
        self.targets = targets_of(parts)
        self._parts = parts
        (self._packed,) = {part.home for part in parts.values()}

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Load these weights, by name, into a slot, replacing its contents."""
        slices = []
        for name, part in self._parts.items():
            if name in weights:
                a, b = weights[name]
                slices.append((part.first_feature, len(a), a.reshape(-1), b.reshape(-1)))
        self._packed.load_adapter(slot, slices)


class AdapterPlaces:
    """All modules of a model that can have adapters.

    Attributes:
        targets: Features in and out of each, by its name in transformers' model.
        num_slots: Number of adapters that are loaded at once.
    """

    def __init__(self, places: Sequence[AdaptedModules], num_slots: int) -> None:
        """Store the modules and the number of slots."""
        self._places = places
        self.num_slots = num_slots
        self.targets: dict[str, tuple[int, int]] = {}
        for place in places:
            self.targets |= place.targets

    def load(self, slot: int, weights: Mapping[str, LoraWeights]) -> None:
        """Load an adapter into a slot, replacing its contents.

        Args:
            slot: Below the number of slots.
            weights: Weights by the names of ``targets``, with matching features; an empty mapping
                clears the slot.

        Raises:
            StepError: There is no such slot.
        """
        if not 0 <= slot < self.num_slots:
            raise StepError(f"slot must be below {self.num_slots}; got {slot}")
        for place in self._places:
            place.load(slot, {name: weights[name] for name in place.targets if name in weights})


def targets_of(parts: Mapping[str, FusedPart]) -> dict[str, tuple[int, int]]:
    """Features in and out of layers, by name."""
    return {name: (part.in_features, part.out_features) for name, part in parts.items()}

"""Adapters in host memory, and those that the slots of the model have."""

from collections.abc import Mapping, Sequence

from pagedserve.config import EngineArgs
from pagedserve.lora.adapter import Shapes
from pagedserve.lora.host import HostAdapters
from pagedserve.lora.weights import LoraWeights


class AdapterSlots:
    """Adapters of an executor, which outlive a worker that is replaced.

    Attributes:
        host: Adapters in host memory.
    """

    def __init__(self, args: EngineArgs, shapes: Shapes) -> None:
        """Start empty.

        Args:
            args: Options of the engine.
            shapes: Sizes of the model's modules that can have adapters.
        """
        self.host = HostAdapters(
            shapes,
            max_rank=args.max_lora_rank,
            max_cpu_loras=args.max_cpu_loras or args.max_loras,
        )
        self._slots: dict[int, Mapping[str, LoraWeights]] = {}
        self._are_lost = False

    def load(
        self, adapters: Sequence[tuple[int, int]]
    ) -> list[tuple[int, Mapping[str, LoraWeights]]]:
        """Weights that the model must load before a step, each with its slot.

        Args:
            adapters: Adapters of the step, as (ordinal, slot).
        """
        loaded = {slot: self.host.weights(ordinal) for ordinal, slot in adapters}
        self._slots |= loaded
        if self._are_lost:
            loaded, self._are_lost = self._slots, False
        return list(loaded.items())

    def lose(self) -> None:
        """Load the contents of all slots again with the next step: the model is another."""
        self._are_lost = True

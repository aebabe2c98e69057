"""State pools: recurrent states of sequences, one slot per sequence.

A recurrent layer keeps some tensors of fixed size, whatever the length of a sequence.  Each has a
pool ``[num_slots, *shape]`` on device and host; a slot means the same slot in all of them.

Invariant: a slot's contents before its first write are undefined, also for a sequence that starts
in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.cache.moves import BlockMoves

StateKind: TypeAlias = Literal["conv", "recurrent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """One tensor of a layer's state of a sequence.

    Attributes:
        kind: name in transformers' cache.
        index: index among those of the same kind in a layer.
        shape: shape for one sequence.
        dtype: name of a torch dtype, which may differ from the model's.
    """

    kind: StateKind
    index: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes for one sequence."""
        return prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


# State shapes of each layer with states, in the order of the layers.
LayerStates: TypeAlias = tuple[tuple[StateShape, ...], ...]


def state_bytes_per_slot(layers: LayerStates) -> int:
    """Bytes of one sequence's states."""
    return sum(state.num_bytes for states in layers for state in states)


class StatePools:
    """The states on one device, and on the host for swapped sequences.

    Attributes:
        device: for each layer and each of its states, ``[num_slots, *shape]``.
        host: likewise, ``[num_cpu_slots, *shape]``.
    """

    def __init__(
        self, layers: LayerStates, *, num_slots: int, num_cpu_slots: int, device: torch.device
    ) -> None:
        """Allocate the pools; they are not written, so unused slots may use no memory yet."""
        self.device = _pools(layers, num_slots, device)
        self.host = _pools(layers, num_cpu_slots, torch.device("cpu"))

    def move(self, moves: BlockMoves) -> None:
        """Execute moves of slots: swap out, swap in, copy, in this order."""
        _move(self.device, self.host, moves.swap_out)
        _move(self.host, self.device, moves.swap_in)
        _move(self.device, self.device, moves.copy)


def _pools(layers: LayerStates, num_slots: int, device: torch.device) -> list[list[Tensor]]:
    return [
        [
            torch.empty((num_slots, *state.shape), dtype=state.torch_dtype, device=device)
            for state in states
        ]
        for states in layers
    ]


def _move(
    sources: Sequence[Sequence[Tensor]],
    destinations: Sequence[Sequence[Tensor]],
    pairs: NDArray[np.int64],
) -> None:
    if not pairs.size:
        return
    slots_from, slots_to = torch.from_numpy(pairs).unbind(1)
    for layer_from, layer_to in zip(sources, destinations, strict=True):
        for source, destination in zip(layer_from, layer_to, strict=True):
            moved = source.index_select(0, slots_from.to(source.device))
            where = slots_to.to(destination.device)
            destination.index_copy_(0, where, moved.to(destination.device))

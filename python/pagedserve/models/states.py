"""Recurrent states of a step: the batches of its rows, and where their states are kept.

The modules with states (`pagedserve.models.mixers`) load and store them through a handler.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from pagedserve.attention.metadata import BatchLayout
from pagedserve.cache.states import LayerStates, StateKind, StateShape
from pagedserve.errors import StepError

_KINDS: Final[tuple[StateKind, ...]] = ("conv", "recurrent")


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of a step that a mixer computes together.

    Attributes:
        num_rows: number of rows.
        tokens: int64, their tokens in the flat batch, row by row; None if these are all, in order.
        slots: int64 ``[num_rows]``, slots of their states.
        begins: whether they are at their first token; else they continue from their states.
    """

    num_rows: int
    tokens: Tensor | None
    slots: Tensor
    begins: bool

    def cut(self, argument: Any, num_tokens: int) -> Any:
        """Select these rows of ``[1, T, ...]``: ``[num_rows, tokens, ...]``; keep the rest."""
        if isinstance(argument, tuple | list):
            return type(argument)(self.cut(part, num_tokens) for part in argument)
        if not isinstance(argument, Tensor) or argument.shape[:2] != (1, num_tokens):
            return argument
        flat = argument[0] if self.tokens is None else argument[0].index_select(0, self.tokens)
        return flat.unflatten(0, (self.num_rows, -1))

    def one_by_one(self, num_tokens: int) -> "list[RowBatch]":
        """Split rows that continue into their first tokens, then their next, and so on."""
        tokens = self.tokens
        if self.begins or (num_tokens if tokens is None else len(tokens)) == self.num_rows:
            return [self]
        if tokens is None:
            tokens = torch.arange(num_tokens, device=self.slots.device)
        return [replace(self, tokens=part) for part in tokens.view(self.num_rows, -1).unbind(1)]


class StateHandler(ABC):
    """Loads and stores states for mixers in one forward pass."""

    def __init__(self, batches: Sequence[RowBatch]) -> None:
        """Store the rows of a step."""
        self.batches = batches

    @abstractmethod
    def load(self, mixer: int, layer: LinearAttentionLayer, rows: RowBatch) -> None:
        """Load the states of rows that continue into a layer of a cache."""

    @abstractmethod
    def store(self, mixer: int, layer: LinearAttentionLayer, rows: RowBatch) -> None:
        """Store the states that a mixer left."""


class PooledStates(StateHandler):
    """States in slots of pools."""

    def __init__(
        self,
        layers: LayerStates,
        pools: Sequence[Sequence[Tensor]],
        layout: BatchLayout,
        device: torch.device,
    ) -> None:
        """Store a step.

        Args:
            layers: state shapes of each mixer.
            pools: pool of each mixer and state, ``[num_slots, *shape]``.
            layout: rows, with the slots of their states.
            device: device of the pools.
        """
        super().__init__(_batches(layout, device))
        self._layers = layers
        self._pools = pools

    def load(self, mixer: int, layer: LinearAttentionLayer, rows: RowBatch) -> None:
        """Copy from the slots."""
        for state, pool in zip(self._layers[mixer], self._pools[mixer], strict=True):
            _held(layer, state.kind)[state.index] = pool.index_select(0, rows.slots)
            if state.kind == "conv":
                layer.is_conv_states_initialized[state.index] = True
                layer.conv_kernel_size[state.index] = state.shape[-1]
            else:
                layer.is_recurrent_states_initialized[state.index] = True
            layer.has_previous_state[state.index] = True

    def store(self, mixer: int, layer: LinearAttentionLayer, rows: RowBatch) -> None:
        """Copy to the slots.

        Raises:
            StepError: the mixer left fewer states than expected.
        """
        for state, pool in zip(self._layers[mixer], self._pools[mixer], strict=True):
            left = _held(layer, state.kind)[state.index]
            if left is None:
                raise StepError(f"layer {mixer} of those with states left no {state.kind} state")
            pool.index_copy_(0, rows.slots, left.to(pool.dtype))


class StateRecorder(StateHandler):
    """Records the states of mixers, in a forward pass of one sequence that starts."""

    def __init__(self, num_mixers: int, device: torch.device) -> None:
        """Start empty."""
        slot = torch.zeros(1, dtype=torch.long, device=device)
        super().__init__([RowBatch(1, None, slot, begins=True)])
        self._found: list[tuple[StateShape, ...]] = [()] * num_mixers

    @property
    def layers(self) -> LayerStates:
        """State shapes of each mixer."""
        return tuple(self._found)

    def load(self, mixer: int, layer: LinearAttentionLayer, rows: RowBatch) -> None:
        """Do nothing: there are no stored states."""

    def store(self, mixer: int, layer: LinearAttentionLayer, rows: RowBatch) -> None:
        """Record the shapes of the states."""
        del rows
        self._found[mixer] = tuple(
            StateShape(
                kind=kind,
                index=index,
                shape=tuple(state.shape[1:]),
                dtype=str(state.dtype).removeprefix("torch."),
            )
            for kind in _KINDS
            for index, state in _held(layer, kind).items()
            if state is not None
        )


def _held(layer: LinearAttentionLayer, kind: StateKind) -> dict[int, Tensor | None]:
    return layer.conv_states if kind == "conv" else layer.recurrent_states


def _batches(layout: BatchLayout, device: torch.device) -> list[RowBatch]:
    """Group rows of equal length that all start or all continue."""
    if layout.state_slots is None:
        raise StepError("the model keeps states, and the step has no slots for them")
    lengths = np.diff(layout.query_start)
    begins = layout.seq_lens == lengths
    batches = []
    for length, is_first in sorted(set(zip(lengths.tolist(), begins.tolist(), strict=True))):
        rows = np.flatnonzero((lengths == length) & (begins == is_first))
        batches.append(
            RowBatch(
                num_rows=len(rows),
                tokens=None if len(rows) == len(lengths) else _tokens(layout, rows, length, device),
                slots=torch.from_numpy(layout.state_slots[rows]).to(device, torch.long),
                begins=is_first,
            )
        )
    return batches


def _tokens(
    layout: BatchLayout, rows: NDArray[np.intp], length: int, device: torch.device
) -> Tensor:
    places = layout.query_start[rows].astype(np.int64)[:, None] + np.arange(length)
    return torch.from_numpy(places.reshape(-1)).to(device)

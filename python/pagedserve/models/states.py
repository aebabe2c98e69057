"""Mixers: modules with a recurrent state per sequence, over a flat batch of many sequences.

A mixer of transformers takes a cache object, whose layer has the states of a batch.  For a flat
batch its forward is replaced by one that splits the batch by rows: those that continue form one
batch, and those that start form batches of equal length.  Each batch gets a cache object of
transformers with the states from its rows' slots, and the states that the mixer leaves there are
copied back.  So the mixer's original code computes everything.

The states of a forward pass are a context variable; without it a mixer is unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from pagedserve.attention.metadata import BatchLayout
from pagedserve.cache.states import LayerStates, StateKind, StateShape
from pagedserve.errors import StepError

# Names of a mixer's cache argument.
CACHE_NAMES: Final = ("cache_params", "past_key_values")
_REST: Final = Parameter.VAR_KEYWORD
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
        """The same, but for rows that continue: the first token of each, then the next."""
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


_handler: ContextVar[StateHandler | None] = ContextVar("pagedserve_states", default=None)


@contextmanager
def keeping(handler: StateHandler) -> Iterator[None]:
    """A context in which the handler keeps the states of every mixer."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


class Mixer:
    """Forward of a mixer, over a flat batch if states are kept."""

    def __init__(self, module: Any, number: int, num_states: int, *, goes_one_by_one: bool) -> None:
        """Replace a module's forward.

        Args:
            module: module of transformers, with a ``layer_idx``.
            number: index among the model's mixers.
            num_states: number of states of each kind in its cache layer.
            goes_one_by_one: whether it continues from states with only one token of a row at a
                time.
        """
        self._forward: Callable[..., Any] = module.forward
        self._signature = signature(module.forward)
        self._cache_name = next(name for name in CACHE_NAMES if name in self._signature.parameters)
        parameters = self._signature.parameters.values()
        of_rest = (parameter.name for parameter in parameters if parameter.kind is _REST)
        self._rest_name = next(of_rest, "")
        self._layer_idx = int(module.layer_idx)
        self._number = number
        self._num_states = num_states
        self._goes_one_by_one = goes_one_by_one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's original forward, once for each batch of rows."""
        handler = _handler.get()
        if handler is None:
            return self._forward(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        hidden: Tensor = next(iter(bound.arguments.values()))
        num_tokens, arguments = hidden.shape[1], dict(bound.arguments)
        arguments |= arguments.pop(self._rest_name, {})
        batches, outputs = handler.batches, []
        if self._goes_one_by_one:
            batches = [part for rows in batches for part in rows.one_by_one(num_tokens)]
        for rows in batches:
            cut = {name: rows.cut(value, num_tokens) for name, value in arguments.items()}
            layer = LinearAttentionLayer(self._num_states)
            if not rows.begins:
                handler.load(self._number, layer, rows)
            cut[self._cache_name] = _MixerCache(layers=[layer] * (self._layer_idx + 1))
            outputs.append(self._forward(**cut))
            handler.store(self._number, layer, rows)
        return _joined(outputs, batches, num_tokens)


class _MixerCache(Cache):
    """A cache for one mixer, under any name that it uses for a state."""

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the recurrent state, by MiniMax's name."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """Store the recurrent state, by MiniMax's name."""
        self.update_recurrent_state(state, layer_idx)


def mixing_modules(model: nn.Module) -> list[Any]:
    """Modules of a model whose forward is a `Mixer`, in order."""
    modules = model.modules()
    return [module for module in modules if isinstance(vars(module).get("forward"), Mixer)]


def _joined(outputs: list[Any], batches: Sequence[RowBatch], num_tokens: int) -> Any:
    """Join a mixer's outputs of batches to that of the flat batch; None if without tokens."""
    if not isinstance(outputs[0], tuple):
        return _flat(outputs, batches, num_tokens)
    rows_and_tokens = outputs[0][0].shape[:2]
    return tuple(
        _flat(part, batches, num_tokens)
        if isinstance(part[0], Tensor) and part[0].shape[:2] == rows_and_tokens
        else None
        for part in zip(*outputs, strict=True)
    )


def _flat(outputs: Sequence[Any], batches: Sequence[RowBatch], num_tokens: int) -> Any:
    """``[1, T, ...]`` from the outputs of batches, ``[rows, tokens, ...]``."""
    if batches[0].tokens is None:
        return outputs[0].flatten(0, 1)[None]
    whole = outputs[0].new_empty((num_tokens, *outputs[0].shape[2:]))
    for output, rows in zip(outputs, batches, strict=True):
        whole.index_copy_(0, rows.tokens, output.flatten(0, 1))
    return whole[None]


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

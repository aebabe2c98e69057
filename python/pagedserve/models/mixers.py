"""Mixers: modules with a recurrent state per sequence, over a flat batch of many sequences.

A mixer of transformers takes a cache object, whose layer has the states of a batch.  For a flat
batch its forward is replaced by one that splits the batch by rows: those that continue form one
batch, and those that start form batches of equal length.  Each batch gets a cache object of
transformers with the states from its rows' slots, and the states that the mixer leaves there are
copied back.  So the mixer's original code computes everything.

In a forward pass whose context keeps no states a mixer is unchanged.
"""

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, Final

from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from pagedserve.models.forward import current_context
from pagedserve.models.states import RowBatch

# Names of a mixer's cache argument.
CACHE_NAMES: Final = ("cache_params", "past_key_values")
_REST: Final = Parameter.VAR_KEYWORD


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
        context = current_context()
        handler = None if context is None else context.states
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

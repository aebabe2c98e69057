"""Rotary embeddings whose angles do not depend on torch's build, beside whole decoder layers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pagedserve.models.rotary import ROPE_TYPES, Rope, half_angles

_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
_CLOSE = 1e-5


class CpuRotary(nn.Module):
    """Rotary embedding of a model, with the angles of `pagedserve.models.rotary`."""

    def __init__(self, frequencies: Mapping[str | None, NDArray[np.float32]]) -> None:
        """Store the frequencies by the type of layers; None where all have the same."""
        super().__init__()
        self._frequencies = frequencies

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[1, T, head_size]`` of positions ``[1, T]``, in the dtype of x."""
        positions = position_ids.reshape(-1).numpy()
        halves = half_angles(self._frequencies[layer_type], positions)
        cosines, sines = (
            torch.from_numpy(np.concatenate((half, half), axis=1))
            .to(x.dtype)
            .view(*position_ids.shape, -1)
            for half in halves
        )
        return cosines, sines


def replace_rotary(model: nn.Module) -> None:
    """Replace the rotary embeddings of a model, in place, if their frequencies are known."""
    for parent in model.modules():
        for name, child in list(parent.named_children()):
            if (found := _rotary_of(child)) is not None:
                setattr(parent, name, found)


def _rotary_of(module: Any) -> CpuRotary | None:
    """The replacement of a rotary embedding; None for any other module."""
    kind = type(module)
    is_known = kind.__module__.startswith("transformers.models.")
    if not is_known or not kind.__name__.endswith("RotaryEmbedding"):
        return None
    types: list[str | None] = [None]
    if isinstance(module.rope_type, dict):
        types = list(module.rope_type)
    frequencies = {layer_type: _frequencies(module, layer_type) for layer_type in types}
    found = {layer_type: kept for layer_type, kept in frequencies.items() if kept is not None}
    return CpuRotary(found) if len(found) == len(types) else None


def _frequencies(module: Any, layer_type: str | None) -> NDArray[np.float32] | None:
    """Frequencies of a type of layers; None if they are not those of the module."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    if parameters["rope_type"] not in ROPE_TYPES:
        return None
    original = parameters.get("original_max_position_embeddings")
    given: dict[str, Any] = {
        name: float(parameters[name]) for name in _FIELDS if name in parameters
    }
    rope = Rope(
        theta=float(parameters["rope_theta"]),
        kind=parameters["rope_type"],
        original_positions=int(original or module.config.max_position_embeddings),
        **given,
    )
    theirs = getattr(module, f"{prefix}inv_freq").float().numpy()
    ours = rope.frequencies(2 * len(theirs))
    is_plain = getattr(module, f"{prefix}attention_scaling") == 1.0
    return ours if is_plain and np.allclose(ours, theirs, rtol=_CLOSE, atol=0) else None

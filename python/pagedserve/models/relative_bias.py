"""Relative position biases of T5-like decoders, by the distance of a key.

Such a decoder computes them for consecutive positions from 0 on.  For a flat batch over pages they
are looked up instead: its attention modules pass the bias of each distance, and the kernels know
the positions.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.errors import UnsupportedModelError
from pagedserve.models.load.files import architecture_of

# Distances beyond the last in the list that are checked.
_NUM_BEYOND = 16


@torch.inference_mode()
def list_biases(model: PreTrainedModel) -> None:
    """Make a decoder's attention pass biases ``[H, N]`` by distance, if it has any.

    Raises:
        UnsupportedModelError: biases still change beyond the last distance.
    """
    decoder: Any = model.get_decoder()
    for module in decoder.modules():
        if not hasattr(module, "compute_bias"):
            continue
        listed = _listed(model, module) if module.has_relative_attention_bias else None
        module.has_relative_attention_bias = True  # else it would create zeros
        module.compute_bias = lambda *_, listed=listed, **__: listed


def _listed(model: PreTrainedModel, module: Any) -> Tensor:
    length = module.relative_attention_max_distance + 1
    bias: Tensor = module.compute_bias(length + _NUM_BEYOND, length + _NUM_BEYOND)
    by_distance = bias[0, :, -1].flip(-1).float()
    if not (by_distance[:, length:] == by_distance[:, length - 1 : length]).all():
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: the biases of its scores "
            f"differ beyond a distance of {length - 1} tokens, which its config calls the last"
        )
    return by_distance[:, :length].contiguous()

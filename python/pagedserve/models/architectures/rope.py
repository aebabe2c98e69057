"""LongRoPE: two sets of rotary frequencies, for sequences up to the original length and beyond.

transformers chooses by the longest sequence of a batch, so the result would depend on the batch.
Here an engine that accepts longer sequences uses the long set for all sequences.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_LONGROPE: Final = "longrope"
# Its rotary embedding ignores the frequencies that it is given.
_WITHOUT_LONG_SET: Final = frozenset(("phimoe",))


def original_positions(config: PreTrainedConfig, parameters: Mapping[str, Any]) -> int | None:
    """Number of positions after which the frequencies change; None if not in the config."""
    for value in (
        parameters.get("original_max_position_embeddings"),
        getattr(config, "original_max_position_embeddings", None),
        getattr(config, "max_position_embeddings", None),
    ):
        if value is not None:
            return int(value)
    return None


def has_long_set(config: PreTrainedConfig) -> bool:
    """Whether the model can use the long set of LongRoPE for all sequences."""
    parameters = getattr(config, "rope_parameters", None) or {}
    is_longrope = parameters.get("rope_type") == _LONGROPE
    return is_longrope and config.model_type not in _WITHOUT_LONG_SET


@torch.no_grad()
def fix_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """Set the long frequencies of a model that accepts more than the original positions."""
    config = model.config.get_text_config()
    if not has_long_set(config):
        return
    original = original_positions(config, config.rope_parameters)
    if original is None or max_model_len <= original:
        return
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if getattr(module, "rope_type", None) == _LONGROPE:
            device = module.inv_freq.device
            frequencies, _ = ROPE_INIT_FUNCTIONS[_LONGROPE](config, device, seq_len=original + 1)
            module.inv_freq.copy_(frequencies)
            # By the original name transformers would choose again in each step.
            module.rope_type = "longrope, the long set"

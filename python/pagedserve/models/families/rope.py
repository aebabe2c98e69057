"""LongRoPE: two sets of rotary frequencies, for sequences up to the original length and beyond.

transformers chooses by the longest sequence of a batch, so the result would depend on the batch.
Here an engine that accepts longer sequences uses the long set for all sequences.
"""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagedserve.models.limits import LONGROPE, has_long_set, original_positions


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
        if getattr(module, "rope_type", None) == LONGROPE:
            device = module.inv_freq.device
            frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](config, device, seq_len=original + 1)
            module.inv_freq.copy_(frequencies)
            # By the original name transformers would choose again in each step.
            module.rope_type = "longrope, the long set"

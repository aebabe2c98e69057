"""Models with made-up weights of the right shapes, to measure without downloading any."""

from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def dummy_model(
    hf_config: PreTrainedConfig,
    *,
    attention: str | dict[str, str],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    auto_class: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """A model with random weights, as its class initialises them for training.

    Args:
        hf_config: its shapes.
        attention: name of the attention function, or of that of each part.
        dtype: of the weights.
        device: where they are made; nothing of them passes through the host.
        seed: the same seed and device make the same weights.
        auto_class: of transformers, which knows the model's class.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), device:
        torch.manual_seed(seed)
        model = auto_class.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    return cast(PreTrainedModel, model)

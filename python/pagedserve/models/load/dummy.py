"""Models with random weights of the right shapes, for measurements without downloads."""

import os
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pagedserve.errors import ModelLoadError


def dummy_model(
    hf_config: PreTrainedConfig,
    *,
    attention: str | dict[str, str],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    auto_class: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """Create a model with random weights, as its class initializes them for training.

    Args:
        hf_config: config with the model's shapes.
        attention: name of the attention implementation, or of that of each part.
        dtype: dtype of the weights.
        device: device on which they are created, without a host copy.
        seed: equal seeds on equal devices give equal weights.
        auto_class: class of transformers that finds the model's class.

    Raises:
        ModelLoadError: the machine has less memory than the weights take.
    """
    if device.type == "cpu":
        _check_memory(auto_class, hf_config, dtype)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), device:
        torch.manual_seed(seed)
        model = auto_class.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    return cast(PreTrainedModel, model)


def _check_memory(auto_class: Any, hf_config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Check the size of the weights first: the system kills a process that exceeds memory."""
    with torch.device("meta"):
        model = auto_class.from_config(hf_config, dtype=dtype)
    num_bytes = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > physical_bytes:
        raise ModelLoadError(
            f"config.json describes weights of {num_bytes >> 20} MiB in {dtype}, and this machine "
            f"has {physical_bytes >> 20} MiB of memory: accepted is what fits"
        )

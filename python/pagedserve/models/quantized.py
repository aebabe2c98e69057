"""Checkpoints whose weights are quantized: what transformers leaves to whoever loads them.

A library of each format's own computes with its weights, or makes them dense while loading.  What
no library quantized is a matter of the model's dtype, like any other model's.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_DENSE: Final = (torch.float32, torch.bfloat16, torch.float16)


def has_quantized_files(config: PreTrainedConfig) -> bool:
    """Whether the weights in a checkpoint's files are quantized."""
    return getattr(config, "quantization_config", None) is not None


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether a model computes with quantized weights: they were not made dense while loading."""
    return getattr(model, "hf_quantizer", None) is not None


def use_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the weights of a quantized checkpoint that are dense a dtype, not that of its files.

    Args:
        model: as transformers loaded it.
        dtype: that it computes in.
    """
    compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if compressor is not None:  # which else leaves it to the first forward
        compressor.decompress_model(model)
    kept = [re.compile(name) for name in model._get_dtype_plan(dtype)]  # noqa: SLF001  # in float32
    for module_name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        is_dense = all(_is_dense(parameter) for parameter in parameters.values())
        for name, parameter in parameters.items():
            # A scale loses nothing when it gets wider, and must not get narrower.
            is_wider = _is_dense(parameter) and dtype.itemsize > parameter.itemsize
            is_kept = any(pattern.search(f"{module_name}.{name}") for pattern in kept)
            if (is_dense or is_wider) and not is_kept:
                parameter.data = parameter.data.to(dtype)


def _is_dense(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.dtype in _DENSE


@contextmanager
def nudged(model: PreTrainedModel, share: float) -> Iterator[None]:
    """The model with its embeddings changed by a share of themselves, every other one downwards.

    Where activations are quantized a rounding can move a number by a whole step, and that moves
    the logits: by how much, a model that is nudged by a rounding tells.
    """

    def nudge(_module: nn.Module, _arguments: Any, embedded: Tensor) -> Tensor:
        signs = torch.ones(embedded.shape[-1], dtype=torch.float32, device=embedded.device)
        signs[::2] = -1
        return (embedded.float() * (1 + share * signs)).to(embedded.dtype)

    handle = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()

"""Checkpoints with quantized weights: checks and conversions that transformers does not do.

The library of each format computes with its weights, or dequantizes them while loading.  Weights
that are not quantized get the model's dtype, as in any other model.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from pagedserve.config.precision import quantization_of_files

_DENSE: Final = (torch.float32, torch.bfloat16, torch.float16)


def has_quantized_files(config: PreTrainedConfig) -> bool:
    """Whether the weights in a checkpoint's files are quantized."""
    return getattr(config, "quantization_config", None) is not None


def check_quant_method(config: PreTrainedConfig) -> None:
    """Check that transformers supports the quantization method, which it would otherwise ignore.

    Raises:
        ValueError: The method is unknown; lists the known ones.
    """
    given: Any = getattr(config, "quantization_config", None)
    if given is None:
        return
    fields = given if isinstance(given, Mapping) else given.to_dict()
    method = fields.get("quant_method")
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return
    method = getattr(method, "value", method)
    if not isinstance(method, str) or method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        known = sorted(map(str, AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise ValueError(
            f"quantization_config.quant_method is {method!r}; it must be one of {', '.join(known)}"
        )


def option_without_library(config: PreTrainedConfig) -> str:
    """Clause of an error that names the option which needs no library; "" if there is none."""
    option = quantization_of_files(getattr(config, "quantization_config", None))
    return f"; on the CPU quantization={option!r} reads them without a library" if option else ""


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether a model computes with quantized weights, not dequantized while loading."""
    return getattr(model, "hf_quantizer", None) is not None


def use_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the unquantized weights of a quantized checkpoint to a dtype.

    Args:
        model: as transformers loaded it.
        dtype: dtype of the computation.
    """
    compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if compressor is not None:  # otherwise it would run in the first forward pass
        compressor.decompress_model(model)
    kept = [re.compile(name) for name in model._get_dtype_plan(dtype)]  # noqa: SLF001  # float32
    for module_name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        is_dense = all(_is_dense(parameter) for parameter in parameters.values())
        for name, parameter in parameters.items():
            # A scale may get a wider dtype, but not a narrower one.
            is_wider = _is_dense(parameter) and dtype.itemsize > parameter.itemsize
            is_kept = any(pattern.search(f"{module_name}.{name}") for pattern in kept)
            if (is_dense or is_wider) and not is_kept:
                parameter.data = parameter.data.to(dtype)


def _is_dense(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.dtype in _DENSE


@contextmanager
def nudged(model: PreTrainedModel, share: float) -> Iterator[None]:
    """A context in which embeddings are changed by a fraction, every other one downwards.

    If activations are quantized, rounding can move a number by a whole step, which moves the
    logits: a model whose input is changed by a rounding error shows by how much.
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

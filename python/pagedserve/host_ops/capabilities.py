"""Capabilities of the Rust kernels: dtypes, vector instructions and threads."""

from typing import Final, Literal

import torch
from torch import Tensor

from pagedserve._core import cpu

# The kernels' names of the supported dtypes.
DTYPE_NAMES: Final[dict[torch.dtype, Literal["float32", "bfloat16", "float16"]]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

# Dtypes of pools whose keys and values are bytes with scales, and the kernels' names of them.
BYTE_DTYPES: Final[dict[torch.dtype, Literal["int8", "fp8_e4m3", "fp8_e5m2"]]] = {
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


def cache_dtype_of(pool: Tensor) -> Literal["auto", "int8", "fp8_e4m3", "fp8_e5m2"]:
    """The kernels' name of how a pool stores keys and values."""
    return BYTE_DTYPES.get(pool.dtype, "auto")


def pool_dtype(cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the pools of a model of ``dtype`` with this ``kv_cache_dtype``."""
    return next((stored for stored, name in BYTE_DTYPES.items() if name == cache_dtype), dtype)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels support such tensors."""
    return device.type == "cpu" and dtype in DTYPE_NAMES


def use_instructions(name: str | None) -> None:
    """Use these vector instructions in this process; see `pagedserve.config.EngineArgs`.

    Raises:
        ConfigError: this CPU does not have them.
    """
    cpu.use_instructions(name)


def describe_kernels() -> str:
    """Describe the machine's features that the kernels use."""
    return f"{cpu.instructions_in_use()}, threads: {torch.get_num_threads()}"

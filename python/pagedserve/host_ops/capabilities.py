"""Capabilities of the Rust kernels: dtypes, vector instructions and threads."""

from typing import Final, Literal

import torch

from pagedserve._core import cpu

# The kernels' names of the supported dtypes.
DTYPE_NAMES: Final[dict[torch.dtype, Literal["float32", "bfloat16", "float16"]]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels support such tensors."""
    return device.type == "cpu" and dtype in DTYPE_NAMES


def has_vectors() -> bool:
    """Whether the kernels use vector instructions instead of portable code."""
    return cpu.instructions_in_use() != "portable"


def use_instructions(name: str | None) -> None:
    """Use these vector instructions in this process; see `pagedserve.config.EngineArgs`.

    Raises:
        ConfigError: this CPU does not have them.
    """
    cpu.use_instructions(name)


def describe_kernels() -> str:
    """Describe the machine's features that the kernels use."""
    return f"{cpu.instructions_in_use()}, threads: {torch.get_num_threads()}"

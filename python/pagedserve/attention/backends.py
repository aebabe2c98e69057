"""Attention backends: selection by device, and the function of each.

A backend's module is imported when its function is first requested, so that triton is loaded only
where it computes.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final, cast

import torch

from pagedserve.attention.metadata import WriteAndAttend
from pagedserve.config import AttentionBackend
from pagedserve.errors import ConfigError
from pagedserve.host_ops.capabilities import describe_kernels, has_kernels

_MODULES: Final[dict[AttentionBackend, str]] = {
    "rust": "pagedserve.attention.rust",
    "triton": "pagedserve.attention.triton",
    "torch": "pagedserve.attention.torch",
}
# A tile of keys is several whole blocks, or a power-of-two part of one.
_MIN_TRITON_BLOCK: Final = 16


@cache
def write_and_attend(backend: AttentionBackend) -> WriteAndAttend:
    """The attention function of a backend."""
    return cast(WriteAndAttend, import_module(_MODULES[backend]).write_and_attend)


def choose_backend(
    requested: AttentionBackend | None, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """Return the requested backend, or the fastest that supports such tensors.

    Raises:
        ConfigError: The requested one does not; the message gives the reason.
    """
    if requested is None:
        return next(name for name in _MODULES if _obstacle(name, device, dtype) is None)
    obstacle = _obstacle(requested, device, dtype)
    if obstacle is not None:
        raise ConfigError(
            f"attention_backend is {requested!r}, which {obstacle}: give another or leave it out"
        )
    return requested


def check_block_size(backend: AttentionBackend, block_size: int) -> None:
    """Refuse a block size that a backend does not support.

    Raises:
        ConfigError: Triton's tiles need powers of two from 16.
    """
    is_power = block_size & (block_size - 1) == 0
    if backend == "triton" and not (is_power and block_size >= _MIN_TRITON_BLOCK):
        raise ConfigError(
            f"block_size is {block_size}; with attention_backend 'triton' it must be a power of "
            f"two, at least {_MIN_TRITON_BLOCK}: give one, or attention_backend='torch'"
        )


def min_block_size(backend: AttentionBackend) -> int:
    """The smallest block size that the backend supports; 4 if it supports any."""
    return _MIN_TRITON_BLOCK if backend == "triton" else 4


def describe(backend: AttentionBackend) -> str:
    """Describe the backend and the machine's features that it uses."""
    if backend == "rust":
        return f"rust ({describe_kernels()})"
    if backend == "triton" and _is_interpreted():
        return "triton (interpreted: TRITON_INTERPRET is set, for tests)"
    return backend


def _obstacle(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend does not support such tensors, None if it does."""
    if backend == "rust" and not has_kernels(device, dtype):
        return (
            f"takes float32, bfloat16 and float16 on the CPU; the model is in {dtype} on {device}"
        )
    if backend == "triton" and find_spec("triton") is None:
        return "needs the package triton, and it is not installed"
    if backend == "triton" and device.type != "cuda" and not _is_interpreted():
        return (
            f"computes on CUDA devices; the model is on {device}, where it runs only in Triton's "
            "interpreter, with TRITON_INTERPRET=1 in the environment"
        )
    return None


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "yes", "y")

"""Who can compute attention on a device, and the function behind each name.

A backend's module is imported when its function is first asked for, so that triton is loaded
only where it computes.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Protocol, cast

import torch
from torch import Tensor

from pagedserve.attention import cpu
from pagedserve.attention.metadata import AttentionMetadata
from pagedserve.attention.paged import AttentionOptions
from pagedserve.config import AttentionBackend
from pagedserve.errors import ConfigError

_HOMES: Final[dict[AttentionBackend, str]] = {
    "rust": "pagedserve.attention.cpu",
    "triton": "pagedserve.attention.triton",
    "torch": "pagedserve.attention.paged",
}
# A tile of keys is whole blocks, or a part of one that is a power of two.
_MIN_TRITON_BLOCK: Final = 16


class WriteAndAttend(Protocol):
    """What a backend's module has under the name ``write_and_attend``."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        *,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Write the step's keys and values into the pool, then attend over it."""


@cache
def write_and_attend(backend: AttentionBackend) -> WriteAndAttend:
    """The function that answers the attention calls of a step."""
    return cast(WriteAndAttend, import_module(_HOMES[backend]).write_and_attend)


def choose_backend(
    wish: AttentionBackend | None, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """The backend wished for, or the fastest that computes on such tensors.

    Raises:
        ConfigError: The one wished for cannot; the message says why.
    """
    if wish is None:
        return next(one for one in _HOMES if _obstacle(one, device, dtype) is None)
    obstacle = _obstacle(wish, device, dtype)
    if obstacle is not None:
        raise ConfigError(
            f"attention_backend is {wish!r}, which {obstacle}: give another or leave it out"
        )
    return wish


def check_block_size(backend: AttentionBackend, block_size: int) -> None:
    """Refuse blocks that a backend cannot read.

    Raises:
        ConfigError: Triton's tiles take powers of two from 16.
    """
    is_power = block_size & (block_size - 1) == 0
    if backend == "triton" and not (is_power and block_size >= _MIN_TRITON_BLOCK):
        raise ConfigError(
            f"block_size is {block_size}; with attention_backend 'triton' it must be a power of "
            f"two, at least {_MIN_TRITON_BLOCK}: give one, or attention_backend='torch'"
        )


def min_block_size(backend: AttentionBackend) -> int:
    """The smallest block that every backend of this kind reads, 4 where any size will do."""
    return _MIN_TRITON_BLOCK if backend == "triton" else 4


def describe(backend: AttentionBackend) -> str:
    """The backend for people, with what it uses of this machine."""
    if backend == "rust":
        return cpu.describe()
    if backend == "triton" and _is_interpreted():
        return "triton (interpreted: TRITON_INTERPRET is set, for tests)"
    return backend


def _obstacle(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot compute on such tensors, None if it can."""
    if backend == "rust" and not cpu.can_attend(device, dtype):
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

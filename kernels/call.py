"""Arguments of one call of paged attention, checked once and passed to decode and prefill."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .pools import NUMBERS

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

LOG2E = 1.4426950408889634
MIN_BLOCK_SIZE = 16
MAX_HEAD_SIZE = 256
# Triton's interpreter runs kernels on the CPU; splits are chosen as for a small device.
INTERPRETED_MULTIPROCESSORS = 8


def padded(size: int) -> int:
    """The power of two, at least 16, for a tile of ``size`` elements."""
    return max(16, 1 << (size - 1).bit_length())


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call; arguments as in ``reference.paged_attention``, with all bounds known.

    Attributes:
        output: ``[T, H, Dv]``, written.
        max_query_len: upper bound of queries per row.
        max_seq_len: upper bound of keys per row.
    """

    output: Tensor
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    cache_scales: Tensor | None
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    alibi: Tensor | None
    causal: bool
    max_query_len: int
    max_seq_len: int

    def __post_init__(self) -> None:
        """Refuse arguments that the kernels would read or write incorrectly."""
        num_heads, key_size = self.query.shape[1:]
        block_size, num_kv_heads, value_size = self.value_cache.shape[1:]
        if self.key_cache.shape != (*self.value_cache.shape[:3], key_size):
            raise ValueError(
                f"keys {list(self.key_cache.shape)} and values {list(self.value_cache.shape)} must "
                f"be [num_blocks, block_size, Hkv, size], the keys' size the query's, {key_size}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
        if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
            raise ValueError(
                f"the block size is {block_size}; the kernels take powers of two from "
                f"{MIN_BLOCK_SIZE}"
            )
        if max(key_size, value_size) > MAX_HEAD_SIZE:
            raise ValueError(
                f"heads of {key_size} and {value_size} elements; the kernels take {MAX_HEAD_SIZE}"
            )
        if self.scale <= 0:
            raise ValueError(f"scale is {self.scale}; the kernels take positive ones")
        stored = {self.key_cache.dtype, self.value_cache.dtype}
        accepted = {self.query.dtype} if self.cache_scales is None else NUMBERS.keys()
        if len(stored) > 1 or not stored <= accepted:
            raise ValueError(
                f"query, keys and values have dtypes {stored | {self.query.dtype}}; they must be "
                "the same, or keys and values with scales one type of bytes"
            )
        if self.output.shape != (*self.query.shape[:2], value_size):
            raise ValueError(
                f"output is {list(self.output.shape)}, not {[*self.query.shape[:2], value_size]}"
            )
        for name in ("output", "query", "key_cache", "value_cache", "block_tables"):
            if getattr(self, name).stride(-1) != 1:
                raise ValueError(f"the last dimension of {name} must be contiguous")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.key_cache.shape[2]

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled, and keys and values not converted."""
        changed = (self.window, self.softcap, self.alibi, self.cache_scales)
        return all(option is None for option in changed)

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.key_cache.shape[2]

    @property
    def num_rows(self) -> int:
        """Rows of the batch, including padding."""
        return self.seq_lens.shape[0]

    def inputs(self) -> tuple[Any, ...]:
        """First arguments of both kernels after their outputs, ``query .. window``."""
        # Scores in powers of two; under a cap, first in its units.
        softcap = 1.0 if self.softcap is None else self.softcap * LOG2E
        scale = self.scale * LOG2E if self.softcap is None else self.scale / self.softcap
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.cache_scales,
            self.block_tables,
            self.query_start,
            self.seq_lens,
            self.sinks,
            self.alibi,
            scale,
            softcap,
            self.window or 0,
        )

    def strides(self) -> tuple[int, ...]:
        """Strides for both kernels, ``table_stride .. scales_head_stride``."""
        scales = (0, 0, 0) if self.cache_scales is None else self.cache_scales.stride()[:3]
        return (
            self.block_tables.stride(0),
            *self.output.stride()[:2],
            *self.query.stride()[:2],
            *self.key_cache.stride()[:3],
            *self.value_cache.stride()[:3],
            *scales,
        )

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of both kernels."""
        key_size, value_size = self.query.shape[-1], self.output.shape[-1]
        return {
            "GROUP": self.group,
            "KEY_SIZE": key_size,
            "VALUE_SIZE": value_size,
            "KEY_PADDED": padded(key_size),
            "VALUE_PADDED": padded(value_size),
            "BLOCK_SIZE": self.key_cache.shape[1],
            "HAS_WINDOW": self.window is not None,
            "HAS_SOFTCAP": self.softcap is not None,
            "HAS_SINKS": self.sinks is not None,
            "HAS_ALIBI": self.alibi is not None,
            "HAS_SCALES": self.cache_scales is not None,
            "CAUSAL": self.causal,
        }

"""Paged attention in Triton: per layer one write and one attention over the pool in place.

The kernels, and with them triton, are imported by the first call.  Sizes come from host integers of
the step, so a layer needs no synchronization and can be captured in a CUDA graph.
"""

import os
from importlib.util import find_spec
from typing import Final

import torch
from torch import Tensor

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions
from pagedserve.errors import ConfigError, UnsupportedModelError

# The least for `fp8_e4m3`.
_E4M3_CAPABILITY: Final = (8, 9)


class TritonBackend(AttentionBackend):
    """Kernels of `pagedserve.kernels`, on NVIDIA GPUs and in Triton's interpreter."""

    name = "triton"
    min_block_size = 16  # a tile of keys is several whole blocks, or a power-of-two part of one
    can_record_graphs = True
    fused_layers = "gpu"

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Refuse other devices, and an installation without triton."""
        del dtype
        if find_spec("triton") is None:
            return "needs the package triton, and it is not installed"
        if device.type == "cuda" or _is_interpreted():
            return None
        return (
            f"computes on CUDA devices; the model is on {device}, where it runs only in Triton's "
            "interpreter, with TRITON_INTERPRET=1 in the environment"
        )

    def check_block_size(self, block_size: int) -> None:
        """Refuse other sizes than powers of two from 16."""
        is_power = block_size & (block_size - 1) == 0
        if not is_power or block_size < self.min_block_size:
            raise ConfigError(
                f"block_size is {block_size}; with attention_backend {self.name!r} it must be a "
                f"power of two, at least {self.min_block_size}: give one, or "
                "attention_backend='torch'"
            )

    def check_cache_dtype(self, cache_dtype: str, device: torch.device) -> None:
        """Refuse a type of bytes that the GPU does not convert."""
        if cache_dtype != "fp8_e4m3" or device.type != "cuda":
            return
        capability = torch.cuda.get_device_capability(device)
        if capability < _E4M3_CAPABILITY:
            raise ConfigError(
                "kv_cache_dtype is 'fp8_e4m3', which a GPU of compute capability "
                f"{'.'.join(map(str, _E4M3_CAPABILITY))} converts, and {device} has "
                f"{'.'.join(map(str, capability))}: give 'int8' or 'fp8_e5m2'"
            )

    def describe(self) -> str:
        """Name, and whether the kernels are interpreted."""
        if _is_interpreted():
            return f"{self.name} (interpreted: TRITON_INTERPRET is set, for tests)"
        return self.name

    def write_and_attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        *,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionBackend`."""
        from pagedserve.kernels.cache import write_cache
        from pagedserve.kernels.pools import pool_parts

        parts = pool_parts(pool, key.shape[-1])
        write_cache(
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            parts.keys,
            parts.values,
            metadata.slot_mapping,
            cache_scales=parts.scales,
        )
        return attend(query[0].transpose(0, 1), pool, metadata=metadata, options=options)


BACKEND: Final = TritonBackend()


def attend(
    query: Tensor, pool: Tensor, *, metadata: AttentionMetadata, options: AttentionOptions
) -> Tensor:
    """Attend over the pool, which already has the step's keys and values.

    Args:
        query: ``[T, H, D]``.
        pool: ``[num_blocks, block_size, Hkv, D + Dv]``, of bytes with 4 more for scales.
        metadata: the step.
        options: scale, window, cap, sinks, slopes, whether it is causal.

    Returns:
        ``[T, H, Dv]``; undefined for tokens of no row.
    """
    from pagedserve.kernels.attention import paged_attention
    from pagedserve.kernels.pools import pool_parts

    if options.position_bias is not None:
        raise UnsupportedModelError(
            "the model adds biases by distance to its scores: accepted are the attention backends "
            "rust and torch"
        )
    rows, parts = metadata.rows(), pool_parts(pool, query.shape[-1])
    return paged_attention(
        query,
        parts.keys,
        parts.values,
        cache_scales=parts.scales,
        block_tables=rows.block_tables,
        query_start=rows.query_start,
        seq_lens=rows.seq_lens,
        scale=options.scale,
        window=options.window,
        softcap=options.softcap,
        sinks=options.sinks,
        alibi=options.alibi,
        causal=options.causal,
        max_query_len=rows.max_query_len,
        max_seq_len=rows.max_seq_len,
    )


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "yes", "y")

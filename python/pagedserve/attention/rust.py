"""Paged attention on the CPU in Rust.

The kernel defines the layout of the pool (``rust/cpu``); other code may copy and swap whole blocks
only.
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve._core.cpu import paged_attention
from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions
from pagedserve.host_ops.capabilities import (
    DTYPE_NAMES,
    cache_dtype_of,
    describe_kernels,
    has_kernels,
)


class RustBackend(AttentionBackend):
    """Kernels of ``rust/cpu``; one call per layer writes and attends."""

    name = "rust"
    fused_layers = "cpu"

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Refuse what the kernels do not compute."""
        if has_kernels(device, dtype):
            return None
        return (
            f"takes float32, bfloat16 and float16 on the CPU; the model is in {dtype} on {device}"
        )

    def check_cache_dtype(self, cache_dtype: str, device: torch.device) -> None:
        """Accept each."""

    def describe(self) -> str:
        """Name, vector instructions and threads."""
        return f"{self.name} ({describe_kernels()})"

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
        """See `AttentionBackend`; the pool is in the kernel's layout."""
        query, key, value = (_dense(tensor) for tensor in (query, key, value))
        _, num_heads, num_tokens, key_size = query.shape
        _, num_kv_heads, _, value_size = value.shape
        output = query.new_empty(num_tokens, num_heads, value_size)
        layout = metadata.layout
        paged_attention(
            dtype=DTYPE_NAMES[query.dtype],
            query=query.data_ptr(),
            query_strides=_strides(query),
            key=key.data_ptr(),
            key_strides=_strides(key),
            value=value.data_ptr(),
            value_strides=_strides(value),
            pool=pool.data_ptr(),
            output=output.data_ptr(),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_size=key_size,
            value_size=value_size,
            num_blocks=pool.shape[0],
            block_size=pool.shape[1],
            block_tables=layout.block_tables.reshape(-1),
            query_start=layout.query_start,
            seq_lens=layout.seq_lens,
            slot_mapping=metadata.slot_mapping.numpy(),
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=_numbers(options.sinks),
            alibi=_numbers(options.alibi),
            position_bias=_numbers(options.position_bias),
            causal=options.causal,
            cache_dtype=cache_dtype_of(pool),
            num_threads=torch.get_num_threads(),
        )
        return output


BACKEND: Final = RustBackend()


def _numbers(vector: Tensor | None) -> NDArray[np.float32] | None:
    """Flatten to float32."""
    return None if vector is None else vector.detach().float().flatten().numpy()


def _dense(tensor: Tensor) -> Tensor:
    """Make the elements of a head contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: Tensor) -> tuple[int, int]:
    """Element strides of tokens and heads, of ``[1, H, T, D]``."""
    return tensor.stride(2), tensor.stride(1)

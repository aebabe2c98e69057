"""Paged attention in Triton: per layer one write and one attention over the pool in place.

Importing this module imports triton.  Sizes come from host integers of the step, so a layer needs
no synchronization and can be captured in a CUDA graph.
"""

from torch import Tensor

from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions
from pagedserve.errors import UnsupportedModelError
from pagedserve.kernels.attention import paged_attention
from pagedserve.kernels.cache import write_cache


def write_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pool: Tensor,
    *,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor:
    """Write the step's keys and values into the pool, then attend over it.

    Args:
        query: ``[1, H, T, D]``.
        key: ``[1, Hkv, T, D]``.
        value: ``[1, Hkv, T, Dv]``.
        pool: ``[num_blocks, block_size, Hkv, D + Dv]``.
        metadata: the step.
        options: scale, window, cap, sinks, slopes, whether it is causal.

    Returns:
        ``[T, H, Dv]``; undefined for tokens of no row.
    """
    key_size = key.shape[-1]
    write_cache(
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        pool[..., :key_size],
        pool[..., key_size:],
        metadata.slot_mapping,
    )
    return attend(query[0].transpose(0, 1), pool, metadata=metadata, options=options)


def attend(
    query: Tensor, pool: Tensor, *, metadata: AttentionMetadata, options: AttentionOptions
) -> Tensor:
    """Attend over the pool, which already has the step's keys and values.

    Args:
        query: ``[T, H, D]``.
        pool: ``[num_blocks, block_size, Hkv, D + Dv]``.
        metadata: the step.
        options: scale, window, cap, sinks, slopes, whether it is causal.

    Returns:
        ``[T, H, Dv]``; undefined for tokens of no row.
    """
    if options.position_bias is not None:
        raise UnsupportedModelError(
            "the model adds biases by distance to its scores: accepted are the attention backends "
            "rust and torch"
        )
    rows, key_size = metadata.rows(), query.shape[-1]
    return paged_attention(
        query,
        pool[..., :key_size],
        pool[..., key_size:],
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

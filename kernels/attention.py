"""Paged attention in Triton: the function of ``reference``, with two kernels.

Rows are distinguished on the device by their number of queries: those with few are computed by
`decode`, which splits their keys, all others by `prefill`.  A batch that may contain both kinds
takes a launch of each, in which the rows of the other kind end at once.

Nothing here synchronizes with the device if the bounds ``max_query_len`` and ``max_seq_len`` are
given, and the launches depend on nothing else: they can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

from . import decode, prefill
from .call import AttentionCall, padded
from .tuning import Config, Kernel, config_for

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

# The smallest tile; in a batch with longer rows too, decode takes rows up to its size.
MIN_ROWS = 16
# Configurations for the interpreter are those of the oldest device.
INTERPRETED_CAPABILITY = 8


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    cache_scales: Tensor | None = None,
    causal: bool = True,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Attention of a ragged batch of rows over paged keys and values.

    Row ``r`` has the queries ``query_start[r] .. query_start[r + 1]``; the last of them is at
    position ``seq_lens[r] - 1`` and attends to that many keys, including its own.  Rows without
    queries, and tokens past the last row, are ignored, and their outputs not written.

    Args:
        query: ``[T, H, D]``, H a multiple of Hkv, D at most 256; query head h reads KV head
            h // (H / Hkv).  float16, bfloat16 or float32, like caches without scales.
        key_cache: ``[num_blocks, block_size, Hkv, D]``, this step's keys already written; the
            block size a power of two from 16, any strides whose last is 1.
        value_cache: ``[num_blocks, block_size, Hkv, Dv]``, likewise.
        block_tables: int32 ``[R, B]`` block ids; entries past a row's last block, or wholly
            before its window, are not read.
        query_start: int32 ``[R + 1]`` row boundaries in T, the first of them 0.
        seq_lens: int32 ``[R]`` keys of each row.
        scale: factor of the scores, positive.
        window: a query attends only to keys with position > its own - window; None attends to all.
        softcap: scores become ``softcap * tanh(scores / softcap)``, before the mask.
        sinks: ``[H]``, attention sinks: one more score per head, without a value.
        alibi: ``[H]`` slopes; a score is increased by its head's slope times (the key's position
            minus the query's), after the cap.
        cache_scales: ``[num_blocks, block_size, Hkv, 2]``, scales of keys and values in bytes (see
            ``pools``); None of those in the query's dtype.
        causal: a query does not attend to later keys; if False, it attends to all keys of its row,
            within a window to those with position < its own + window.
        max_query_len: upper bound of queries per row; None reads it from the device.
        max_seq_len: upper bound of keys per row; None reads it from the device.
        output: ``[T, H, Dv]``, written and returned; None allocates it.

    Returns:
        ``[T, H, Dv]`` in the dtype of the query; sums are in float32.

    Raises:
        ValueError: unsupported shapes, sizes or dtypes.
    """
    if output is None:
        output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    if max_query_len is None:
        max_query_len = int(query_start.diff().max()) if seq_lens.numel() else 0
    if max_seq_len is None:
        max_seq_len = int(seq_lens.max()) if seq_lens.numel() else 0
    call = AttentionCall(
        output=output,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        cache_scales=cache_scales,
        block_tables=block_tables,
        query_start=query_start,
        seq_lens=seq_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi=alibi,
        causal=causal,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    if max_query_len == 0:
        return output
    wide = _config("decode_wide", call).rows
    queries = decode_queries(max_query_len, call.group, wide)
    few: Kernel = "decode" if padded(queries * call.group) == MIN_ROWS else "decode_wide"
    decode.launch(call, _config(few, call), queries=queries)
    if max_query_len > queries:
        many: Kernel = "prefill_plain" if call.is_plain else "prefill"
        prefill.launch(call, _config(many, call), skipped=queries)
    return output


def decode_queries(max_query_len: int, group: int, wide: int) -> int:
    """Maximum queries of a row that decode takes.

    Args:
        max_query_len: maximum of the batch; all of it is decoded if its rows, packed with the heads
            of a group, fit the widest tile.
        group: query heads per KV head.
        wide: rows of that tile.
    """
    if max_query_len * group <= wide:
        return max_query_len
    return max(1, MIN_ROWS // group)


def _config(kernel: Kernel, call: AttentionCall) -> Config:
    device = call.query.device
    capability = INTERPRETED_CAPABILITY
    if device.type == "cuda":
        capability = int(torch.cuda.get_device_properties(device).major)
    return config_for(
        kernel,
        head_size=max(call.query.shape[-1], call.output.shape[-1]),
        itemsize=call.query.element_size(),
        capability=capability,
        stores_bytes=call.cache_scales is not None,
    )

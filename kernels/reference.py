"""Reference implementation of the kernels in plain torch: any device, any floating dtype.

These define each kernel in the simplest way; every faster implementation is tested against them.

A KV cache of one layer is two tensors, ``key_cache [num_blocks, block_size, Hkv, D]`` and
``value_cache [num_blocks, block_size, Hkv, Dv]``; they may be views of one pool.  Slot ``s``
is position ``s % block_size`` of block ``s // block_size``.

Invariants:

1. A slot without a key that is attended to is never read: its contents (never written, stale, NaN)
   cannot affect a result.
2. Moves read all their sources before they write the first destination.
"""

import torch
from torch import Tensor
from torch.nn import functional

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")


def write_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write one step's keys and values into their slots.

    Args:
        key: ``[T, Hkv, D]``.
        value: ``[T, Hkv, Dv]``.
        key_cache: ``[num_blocks, block_size, Hkv, D]``, written in place.
        value_cache: ``[num_blocks, block_size, Hkv, Dv]``, written in place.
        slot_mapping: int64 ``[T]``; tokens with -1 are not written.
    """
    written = slot_mapping >= 0
    if not bool(written.all()):
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy blocks within one pool.

    Args:
        cache: ``[num_blocks, ...]``, written in place.
        pairs: int64 ``[n, 2]``, rows of (source, destination); destinations are distinct.
    """
    cache.index_copy_(0, pairs[:, 1], cache.index_select(0, pairs[:, 0]))


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy blocks between pools on device and host.

    Args:
        source: ``[num_blocks, ...]``.
        destination: ``[num_blocks_there, ...]`` of the same block shape, on any device;
            written in place.
        pairs: int64 ``[n, 2]``, rows of (block in source, block in destination).
    """
    moved = source.index_select(0, pairs[:, 0].to(source.device))
    destination.index_copy_(0, pairs[:, 1].to(destination.device), moved.to(destination.device))


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
        query: ``[T, H, D]``, H a multiple of Hkv; query head h reads KV head h // (H / Hkv).
        key_cache: ``[num_blocks, block_size, Hkv, D]``, this step's keys already written.
        value_cache: ``[num_blocks, block_size, Hkv, Dv]``.
        block_tables: ``[R, B]`` block ids; undefined past a row's last block.
        query_start: ``[R + 1]`` row boundaries in T.
        seq_lens: ``[R]`` keys of each row.
        scale: factor of the scores.
        window: a query attends only to keys with position > its own - window; None attends to all.
        softcap: scores become ``softcap * tanh(scores / softcap)``, before the mask.
        sinks: ``[H]``, attention sinks: one more score per head, without a value.
        alibi: ``[H]`` slopes; a score is increased by its head's slope times (the key's position
            minus the query's), after the cap.
        causal: a query does not attend to later keys; if False, it attends to all keys of its row,
            within a window to those with position < its own + window.
        max_query_len: upper bound of queries per row; known on the host, it saves the kernels a
            device synchronization.  None reads it from ``query_start``.
        max_seq_len: upper bound of keys per row; None reads it from ``seq_lens``.
        output: ``[T, H, Dv]``, written and returned; None allocates it.

    Returns:
        ``[T, H, Dv]`` in the dtype of the query; computed in float32 at least.

    Raises:
        ValueError: a row exceeds its bound.
    """
    if output is None:
        output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    _check_bound("max_query_len", max_query_len, query_start.diff())
    _check_bound("max_seq_len", max_seq_len, seq_lens)
    block_size = key_cache.shape[1]
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = int(query_start[row]), int(query_start[row + 1])
        if start == end:
            continue
        num_blocks = -(-seq_len // block_size)
        blocks = block_tables[row, :num_blocks].to(torch.int64)
        output[start:end] = _attend_row(
            query[start:end],
            key_cache[blocks].flatten(0, 1)[:seq_len],
            value_cache[blocks].flatten(0, 1)[:seq_len],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi=alibi,
            causal=causal,
        )
    return output


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Add to the residual stream, and normalize the sum by its root mean square.

    Args:
        x: ``[T, F]``.
        residual: ``[T, F]``; becomes the sum.
        weight: ``[F]``.
        epsilon: added to the mean square.

    Returns:
        ``[T, F]``.
    """
    residual += x
    return functional.rms_norm(residual, weight.shape, weight, epsilon)


def rotate_and_write(
    qkv: Tensor,
    cosines: Tensor,
    sines: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    epsilon: float = 0.0,
) -> Tensor:
    """Rotate queries and keys, and write keys and values into their slots.

    Args:
        qkv: ``[T, (H + 2 Hkv) * D]``: queries, keys, values.
        cosines: ``[T, rotary size]``; elements of a head beyond that size are not rotated.
        sines: likewise.
        key_cache: ``[num_blocks, block_size, Hkv, D]``, written in place.
        value_cache: likewise.
        slot_mapping: int64 ``[T]``; keys and values of tokens with -1 are not written.
        query_norm: ``[D]``, weight of the norm that is applied to each query first.
        key_norm: the same for keys.
        epsilon: epsilon of these norms.

    Returns:
        The queries, ``[T, H, D]``.
    """
    kv_heads, size = key_cache.shape[2:]
    heads = qkv.view(len(qkv), qkv.shape[1] // size, size)
    num_heads = heads.shape[1] - 2 * kv_heads
    query, key, value = heads.tensor_split((num_heads, num_heads + kv_heads), dim=1)
    key = _rotated(key, cosines, sines, key_norm, epsilon)
    write_cache(key, value, key_cache, value_cache, slot_mapping)
    return _rotated(query, cosines, sines, query_norm, epsilon)


def _rotated(
    heads: Tensor, cosines: Tensor, sines: Tensor, norm: Tensor | None, epsilon: float
) -> Tensor:
    """Heads ``[T, n, D]``, normalized and rotated."""
    if norm is not None:
        heads = functional.rms_norm(heads, norm.shape, norm, epsilon)
    size = cosines.shape[-1]
    low, high, rest = heads.tensor_split((size // 2, size), dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    rotated = heads[..., :size] * cosines[:, None] + turned * sines[:, None]
    return torch.cat((rotated, rest), dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``.

    Args:
        gate_up: ``[T, 2 F]``: gates, then ups.

    Returns:
        ``[T, F]``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def add_adapters(
    output: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    features: Tensor,
    starts: Tensor,
    order: Tensor,
) -> None:
    """Add the adapters of rows to the output of linear layers.

    Args:
        output: ``[T, N]``, output of fused linear layers; modified in place.
        x: ``[T, K]``, input of the layers.
        a: ``[num_slots, slices, R, K]``, a slice for each layer; undefined beyond a rank.
        b: ``[num_slots, N, R]``, 0 beyond a rank.
        ranks: int32 ``[num_slots, slices]``, at most R, 0 for none.
        features: int32 ``[slices + 1]``, start of each slice's features, and N.
        starts: int32 ``[num_slots + 1]``, start of each slot's rows in ``order``.
        order: int32 ``[T]``, rows by slot; undefined past the last start.
    """
    for slot, rows in enumerate(_rows_of_slots(starts, order)):
        for piece, rank in enumerate(ranks[slot].tolist()):
            begin, end = features[piece : piece + 2].tolist()
            hidden = x[rows] @ a[slot, piece, :rank].T
            output[rows, begin:end] += hidden @ b[slot, begin:end, :rank].T


def add_embedding_adapters(
    output: Tensor,
    ids: Tensor,
    table: Tensor,
    b: Tensor,
    ranks: Tensor,
    features: Tensor,
    starts: Tensor,
    order: Tensor,
) -> None:
    """Add the adapters of rows to the output of an embedding.

    Args:
        output: ``[T, N]``; modified in place.
        ids: int ``[T]``, tokens.
        table: ``[num_slots, tokens, R]``, undefined beyond a rank.
        b: ``[num_slots, N, R]``, 0 beyond a rank.
        ranks: int32 ``[num_slots, 1]``, as in ``add_adapters``.
        features: int32 ``[2]``, 0 and N.
        starts: int32 ``[num_slots + 1]``, as in ``add_adapters``.
        order: int32 ``[T]``, as in ``add_adapters``.
    """
    begin, end = features.tolist()
    for slot, rows in enumerate(_rows_of_slots(starts, order)):
        rank = int(ranks[slot])
        hidden = table[slot, ids[rows], :rank]
        output[rows, begin:end] += hidden @ b[slot, begin:end, :rank].T


def _rows_of_slots(starts: Tensor, order: Tensor) -> list[Tensor]:
    return list(order[: int(starts[-1])].long().split(starts.diff().tolist()))


def _check_bound(name: str, bound: int | None, lengths: Tensor) -> None:
    longest = int(lengths.max()) if lengths.numel() else 0
    if bound is not None and bound < longest:
        raise ValueError(f"{name} is {bound}, but a row has {longest}")


def _attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attention of one row: query [Q, H, D], key [L, Hkv, D], value [L, Hkv, Dv]."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    key = key.to(dtype).repeat_interleave(group, dim=1)
    value = value.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,lhd->hql", query.to(dtype), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key_position = torch.arange(key.shape[0], device=query.device)
    position = key_position[-query.shape[0] :, None]
    if alibi is not None:
        scores = scores + alibi.to(dtype)[:, None, None] * (key_position - position)
    visible = key_position <= position if causal else key_position >= 0
    if window is not None:
        visible = visible & ((key_position - position).abs() < window)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        sink = sinks.to(dtype)[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[0]]
    return torch.einsum("hql,lhd->qhd", weights, value).to(query.dtype)

"""Paged attention of rows with few queries: bound by reading keys and values.

A program takes all queries of one row and one KV head, and a part of the row's keys; with few rows,
a row is split over several programs, and a second kernel merges their results (Dao et al.,
"Flash-Decoding for long-context inference", 2023).  The host fixes the number of splits; the device
computes the keys per split from the row's length, so a launch that was captured for the longest
context also splits a short one evenly.

Invariants:

1. Rows without queries, or with more than ``queries``, are ignored.
2. Split ``s`` of a row takes the keys ``first + s * share ..``; a row whose keys fit one split is
   written by it, any other by the merge.  Both compute this with `_shares`.

Cost: keys and values are read once, plus ``2 * 4 * Dv`` bytes per query head and split.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .call import AttentionCall, multiprocessors, padded
from .tile import LOG2E, attend, load_rows, start_softmax
from .tuning import Config

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

# A split below this many tiles ends before its loads are well under way.
MIN_TILES = tl.constexpr(2)
MAX_SPLITS = 128
# Start of a program, and the whole merge kernel, in tiles of keys.
START_TILES = 2
MERGE_TILES = 4
# Splits that the merge loads at a time: about the number for one row over a whole device.
MERGE_TILE = 32


@triton.jit
def _shares(length, count, window, num_splits, HAS_WINDOW: tl.constexpr, KEY_TILE: tl.constexpr):
    """First key that a row attends to, and the keys per split."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - count - window + 1, 0)
    tiles = tl.cdiv(length - first, KEY_TILE)
    return first, tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES) * KEY_TILE


# Numbers that depend on the batch are not specialized, so that no step compiles a kernel.
@triton.jit(
    do_not_specialize=["queries", "num_splits", "window", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "query_start", "seq_lens"],
)
def _decode_kernel(
    output,
    partial_values,
    partial_sums,
    query,
    key_cache,
    value_cache,
    cache_scales,
    block_tables,
    query_start,
    seq_lens,
    sinks,
    alibi,
    scale,
    softcap,
    window,
    queries,
    num_splits,
    table_stride,
    output_token_stride,
    output_head_stride,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    scales_block_stride,
    scales_slot_stride,
    scales_head_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Programs (KV head, split, row); the KV heads of a slot are adjacent and read together."""
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # All loads before the first branch: one memory latency instead of two.
    token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - token
    length = tl.load(seq_lens + row)
    if (count == 0) | (count > queries):
        return
    first, share = _shares(length, count, window, num_splits, HAS_WINDOW, KEY_TILE)
    begin = first + split * share
    if (split > 0) & (begin >= length):
        return

    packed = tl.arange(0, ROWS)
    is_query = packed < count * GROUP
    # Padding rows of the tile repeat the last query's position: they attend to keys, without NaN.
    own = tl.minimum(packed // GROUP, count - 1)
    head = kv_head * GROUP + packed % GROUP
    position = length - count + own
    places = (token + own).to(tl.int64)
    rows = query + places * query_token_stride + head * query_head_stride
    tile = load_rows(rows, is_query, KEY_SIZE, KEY_PADDED, True)
    slope = tl.zeros([ROWS], tl.float32)
    if HAS_ALIBI:
        slope = tl.load(alibi + head).to(tl.float32) * LOG2E
    peak, total = start_softmax(sinks + head if HAS_SINKS else sinks, split == 0, ROWS, HAS_SINKS)
    accumulator, total, peak = attend(
        tl.zeros([ROWS, VALUE_PADDED], tl.float32),
        total,
        peak,
        tile,
        position,
        slope,
        begin,
        tl.minimum(begin + share, length),
        block_tables + row.to(tl.int64) * table_stride,
        key_cache + kv_head * key_head_stride,
        value_cache + kv_head * value_head_stride,
        cache_scales + kv_head * scales_head_stride if HAS_SCALES else cache_scales,
        key_block_stride,
        key_slot_stride,
        value_block_stride,
        value_slot_stride,
        scales_block_stride,
        scales_slot_stride,
        scale,
        softcap,
        window,
        KEY_SIZE,
        VALUE_SIZE,
        KEY_PADDED,
        VALUE_PADDED,
        BLOCK_SIZE,
        KEY_TILE,
        HAS_WINDOW,
        HAS_SOFTCAP,
        HAS_ALIBI,
        HAS_SCALES,
        CAUSAL,
        True,
    )

    dims = tl.arange(0, VALUE_PADDED)
    written = is_query[:, None] & (dims < VALUE_SIZE)[None, :]
    if first + share >= length:
        result = accumulator / tl.where(total == 0, 1.0, total)[:, None]
        outputs = output + places * output_token_stride + head * output_head_stride
        tl.store(outputs[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=written)
    else:
        num_heads = tl.num_programs(0) * GROUP
        place = ((row.to(tl.int64) * queries + own) * num_heads + head) * num_splits + split
        tl.store(partial_sums + place * 2, peak, mask=is_query)
        tl.store(partial_sums + place * 2 + 1, total, mask=is_query)
        partials = partial_values + place * VALUE_SIZE
        tl.store(partials[:, None] + dims[None, :], accumulator, mask=written)


@triton.jit(
    do_not_specialize=["queries", "num_splits", "window"],
    do_not_specialize_on_alignment=["query_start", "seq_lens"],
)
def _merge_kernel(
    output,
    partial_values,
    partial_sums,
    query_start,
    seq_lens,
    window,
    queries,
    num_splits,
    output_token_stride,
    output_head_stride,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    KEY_TILE: tl.constexpr,
    MERGE_TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Programs (row and query, head): one output from the splits of its row."""
    place, head = tl.program_id(0), tl.program_id(1)
    row, own = place // queries, place % queries
    token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - token
    length = tl.load(seq_lens + row)
    if (own >= count) | (count > queries):
        return
    first, share = _shares(length, count, window, num_splits, HAS_WINDOW, KEY_TILE)
    if first + share >= length:
        return
    used = tl.cdiv(length - first, share)
    dims = tl.arange(0, VALUE_PADDED)
    start = (place.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    peak, total = -float("inf"), 0.0
    accumulator = tl.zeros([VALUE_PADDED], tl.float32)
    for tile in range(0, used, MERGE_TILE):
        split = tile + tl.arange(0, MERGE_TILE)
        sums = partial_sums + (start + split) * 2
        peaks = tl.load(sums, mask=split < used, other=-float("inf"))
        totals = tl.load(sums + 1, mask=split < used, other=0.0)
        rows = partial_values + (start + split) * VALUE_SIZE
        values = load_rows(rows, split < used, VALUE_SIZE, VALUE_PADDED, True)
        # Of several queries one may attend to no key of some splits, but each attends to a key
        # among
        # the first of them: from there on the peak is finite, and -inf - -inf does not occur.
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        weights = tl.exp2(peaks - new_peak)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights * totals, 0)
        accumulator = accumulator * shrink + tl.sum(weights[:, None] * values, 0)
        peak = new_peak
    rows = output + (token + own).to(tl.int64) * output_token_stride + head * output_head_stride
    result = accumulator / total
    tl.store(rows + dims, result.to(output.dtype.element_ty), mask=dims < VALUE_SIZE)


@lru_cache
def num_splits(programs: int, tiles: int, slots: int) -> int:
    """Number of splits with the shortest launch; cached, since every layer of a step needs it.

    Programs run in waves of ``slots``; a wave takes as long as the tiles of its longest program
    plus its start.

    Args:
        programs: rows times KV heads.
        tiles: tiles of keys in the longest row.
        slots: programs that the device runs at a time.
    """

    def cost(splits: int) -> int:
        waves = -(-programs * splits // slots)
        return waves * (-(-tiles // splits) + START_TILES) + (MERGE_TILES if splits > 1 else 0)

    return min(range(1, max(1, min(tiles // MIN_TILES.value, MAX_SPLITS)) + 1), key=cost)


def launch(call: AttentionCall, config: Config, *, queries: int) -> None:
    """Attend for the rows with 1 to ``queries`` queries.

    Args:
        call: the batch.
        config: tile configuration; the tile has enough rows for ``queries`` of a group.
        queries: maximum queries of a row.
    """
    constants = call.constants()
    splits = num_splits(
        call.num_rows * call.num_kv_heads,
        -(-call.max_seq_len // config.key_tile),
        multiprocessors(call.query.device) * config.resident,
    )
    places = (call.num_rows * queries * call.query.shape[1], splits)
    is_split = splits > 1
    partial_values = call.query.new_empty(
        (*places, call.output.shape[-1]) if is_split else 0, dtype=torch.float32
    )
    partial_sums = call.query.new_empty((*places, 2) if is_split else 0, dtype=torch.float32)
    _decode_kernel[(call.num_kv_heads, splits, call.num_rows)](
        call.output,
        partial_values,
        partial_sums,
        *call.inputs(),
        queries,
        splits,
        *call.strides(),
        ROWS=padded(queries * call.group),
        KEY_TILE=config.key_tile,
        **constants,
        **config.options(),
    )
    if is_split:
        _merge_kernel[(call.num_rows * queries, call.query.shape[1])](
            call.output,
            partial_values,
            partial_sums,
            call.query_start,
            call.seq_lens,
            call.window or 0,
            queries,
            splits,
            *call.output.stride()[:2],
            VALUE_SIZE=constants["VALUE_SIZE"],
            VALUE_PADDED=constants["VALUE_PADDED"],
            KEY_TILE=config.key_tile,
            MERGE_TILE=MERGE_TILE,
            HAS_WINDOW=constants["HAS_WINDOW"],
            enable_fp_fusion=True,
        )

"""Paged attention of rows with many queries, with or without a cached prefix: compute-bound.

A program takes a tile of queries of one row, with all query heads of one KV head.  The tiles of all
rows are numbered consecutively; a program finds its row by bisection, so the launch needs only T
and the number of rows from the host: row ``r`` starts at tile ``query_start[r] // Q + r`` for tiles
of Q queries, which leaves at most one tile per row unused.

Keys that no query attends to, before the window and after the last query or its window, are
skipped. Keys that every query attends to need no comparison.  The tiles in between are masked: the
causal diagonal or the end of the row, and the window's edges.

Invariant: rows of up to ``skipped`` queries are ignored.
"""

import triton
import triton.language as tl

from .call import AttentionCall, padded
from .tile import LOG2E, attend, load_rows, start_softmax
from .tuning import Config

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")


@triton.jit
def _find_row(query_start, tile, num_rows, QUERIES: tl.constexpr):
    """The last row that starts at ``tile`` or before."""
    low, high = 1, num_rows
    while low < high:
        middle = (low + high) // 2
        begins_later = tl.load(query_start + middle) // QUERIES + middle > tile
        low = tl.where(begins_later, low, middle + 1)
        high = tl.where(begins_later, middle, high)
    return low - 1


@triton.jit(
    do_not_specialize=["num_rows", "skipped", "window", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "query_start", "seq_lens"],
)
def _prefill_kernel(
    output,
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
    num_rows,
    skipped,
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
    QUERIES: tl.constexpr,
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
    """Programs (tile, KV head): a KV head's programs run together, on keys in the L2 cache."""
    # The last tiles of a row attend to the most keys: they start first, short ones fill the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _find_row(query_start, tile, num_rows, QUERIES)
    token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - token
    length = tl.load(seq_lens + row)
    start = (tile - token // QUERIES - row) * QUERIES
    if (start >= count) | (count <= skipped):
        return

    packed = tl.arange(0, ROWS)
    is_query = (packed < QUERIES * GROUP) & (start + packed // GROUP < count)
    # Padding rows of the tile repeat the last query's position: they attend to keys, without NaN.
    last = tl.minimum(start + QUERIES, count) - 1
    own = tl.minimum(start + packed // GROUP, last)
    head = kv_head * GROUP + packed % GROUP
    position = length - count + own
    places = (token + own).to(tl.int64)
    rows = query + places * query_token_stride + head * query_head_stride
    queries = load_rows(rows, is_query, KEY_SIZE, KEY_PADDED, True)
    slope = tl.zeros([ROWS], tl.float32)
    if HAS_ALIBI:
        slope = tl.load(alibi + head).to(tl.float32) * LOG2E
    peak, total = start_softmax(sinks + head if HAS_SINKS else sinks, True, ROWS, HAS_SINKS)
    accumulator = tl.zeros([ROWS, VALUE_PADDED], tl.float32)

    table = block_tables + row.to(tl.int64) * table_stride
    keys = key_cache + kv_head * key_head_stride
    values = value_cache + kv_head * value_head_stride
    scales = cache_scales + kv_head * scales_head_stride if HAS_SCALES else cache_scales
    first_position, last_position = length - count + start, length - count + last
    begin, end = 0, length
    open_begin, open_last = 0, length  # between them every query attends to every key
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0)
        hidden = tl.maximum(last_position + 1 - window, 0) - begin
        open_begin = begin + tl.cdiv(hidden, KEY_TILE) * KEY_TILE
        end = tl.minimum(last_position + window, length)
        open_last = tl.minimum(first_position + window, length)
    if CAUSAL:
        end, open_last = last_position + 1, first_position + 1
    open_end = begin + (open_last - begin) // KEY_TILE * KEY_TILE
    open_end = tl.maximum(open_begin, open_end)
    for region in tl.static_range(0 if HAS_WINDOW else 1, 3):
        if region == 0:
            region_begin, region_end = begin, tl.minimum(open_begin, end)
        elif region == 1:
            region_begin, region_end = open_begin, open_end
        else:
            region_begin, region_end = open_end, end
        accumulator, total, peak = attend(
            accumulator,
            total,
            peak,
            queries,
            position,
            slope,
            region_begin,
            region_end,
            table,
            keys,
            values,
            scales,
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
            region != 1,
        )

    result = accumulator / tl.where(total == 0, 1.0, total)[:, None]
    dims = tl.arange(0, VALUE_PADDED)
    outputs = output + places * output_token_stride + head * output_head_stride
    tl.store(
        outputs[:, None] + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=is_query[:, None] & (dims < VALUE_SIZE)[None, :],
    )


def launch(call: AttentionCall, config: Config, *, skipped: int) -> None:
    """Attend for the rows with more than ``skipped`` queries.

    Args:
        call: the batch.
        config: tile configuration; ``config.rows`` grows to hold one query of a group.
        skipped: rows with at most this many queries are ignored.
    """
    rows = max(config.rows, padded(call.group))
    queries = rows // call.group
    # Tokens past the last row only add tiles without work.
    num_tiles = call.query.shape[0] // queries + call.num_rows
    _prefill_kernel[(num_tiles, call.num_kv_heads)](
        call.output,
        *call.inputs(),
        call.num_rows,
        skipped,
        *call.strides(),
        ROWS=rows,
        QUERIES=queries,
        KEY_TILE=config.key_tile,
        **call.constants(),
        **config.options(),
    )

"""A tile of queries against a range of keys: the arithmetic that decode and prefill share.

A tile packs queries, and for each of them the query heads of one KV head, into its rows, so that
a key or value is read once for the whole group.  The softmax is computed while the keys come
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3), in powers
of two: ``peak`` is the largest score seen, ``total`` the sum of ``2 ** (score - peak)``, and
``accumulator`` the values weighted with the same.

Invariants:

1. No slot and no table entry before ``begin`` or from ``end`` on is read; what a load leaves out
   is 0.  Every slot read holds a key that some row of the tile sees.
2. A row that has seen no key has peak -inf, total 0 and accumulator 0.

Block ids are widened to 64 bits before they meet a stride: pools have more than 2 ** 31 elements.
"""

import triton
import triton.language as tl

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(rows, inside, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """``[n, PADDED]``: SIZE elements from each pointer in ``rows``, zeros where not ``inside``."""
    dims = tl.arange(0, PADDED)
    pointers = rows[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=inside[:, None] & (dims < SIZE)[None, :], other=0.0)
    if SIZE < PADDED:
        return tl.load(pointers, mask=(dims < SIZE)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def start_softmax(sinks, is_first, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Peak and total before any key; ``sinks [ROWS]`` points at scores that count if first."""
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks).to(tl.float32) * LOG2E
        peak = tl.where(is_first, sink, peak)
        total = tl.where(is_first, 1.0, total)
    return peak, total


@triton.jit
def tanh(x):
    """Hyperbolic tangent from a power that cannot overflow."""
    power = tl.exp2(tl.abs(x) * LOG2E * -2)
    size = (1 - power) / (1 + power)
    return tl.where(x < 0, -size, size)


@triton.jit
def seen(place, inside, position, window, HAS_WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """Which keys at ``place [keys]`` queries at ``position [rows]`` see; a mask for both."""
    visible = inside[None, :]
    if CAUSAL:
        visible = visible & (place[None, :] <= position[:, None])
    elif HAS_WINDOW:
        visible = visible & (place[None, :] < position[:, None] + window)
    if HAS_WINDOW:
        visible = visible & (place[None, :] > position[:, None] - window)
    return visible


@triton.jit
def attend(
    accumulator,
    total,
    peak,
    query,
    position,
    slope,
    begin,
    end,
    table,
    keys,
    values,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    scale,
    softcap,
    window,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys at ``begin .. end`` into the running softmax of a tile.

    Args:
        accumulator: float32 ``[rows, VALUE_PADDED]``.
        total: float32 ``[rows]``.
        peak: float32 ``[rows]``.
        query: ``[rows, KEY_PADDED]``, columns past KEY_SIZE are 0.
        position: int32 ``[rows]``, of each row's query.
        slope: float32 ``[rows]``, ALiBi slopes times log2(e).
        begin: first key.
        end: one past the last; whole tiles from ``begin`` unless MASKED.
        table: the row's block ids.
        keys: the pool, at the KV head.
        values: likewise.
        key_block_stride: elements between the blocks of the keys.
        key_slot_stride: elements between the slots of a block of keys.
        value_block_stride: the same of the values.
        value_slot_stride: the same of the values.
        scale: turns a product into a score: into powers of two, or into units of the cap.
        softcap: the cap times log2(e).
        window: keys that a query sees.
        KEY_SIZE: elements of a key.
        VALUE_SIZE: elements of a value.
        KEY_PADDED: the power of two that holds a key.
        VALUE_PADDED: the power of two that holds a value.
        BLOCK_SIZE: slots of a block.
        KEY_TILE: keys taken at a time.
        HAS_WINDOW: whether queries see only ``window`` keys.
        HAS_SOFTCAP: whether scores are capped.
        HAS_ALIBI: whether ``slope`` counts.
        CAUSAL: whether queries see no key behind their own.
        MASKED: whether some row may not see some of the keys; without it none is compared.

    Returns:
        accumulator, total, peak.
    """
    # Without cap or slopes the products are scaled where the power is taken: one operation less.
    IS_PLAIN: tl.constexpr = not (HAS_SOFTCAP or HAS_ALIBI)
    offsets = tl.arange(0, KEY_TILE)
    next_place = begin + offsets
    next_block = tl.load(table + next_place // BLOCK_SIZE, mask=next_place < end, other=0)
    for start in tl.range(begin, end, KEY_TILE):
        # From the loop's own number, not carried along: that takes registers, and in every layout
        # in which places are wanted.
        place = start + offsets
        inside = place < end
        block, slot = next_block.to(tl.int64), place % BLOCK_SIZE
        # Block ids are loaded one tile ahead.  Were they loaded where they are used, the compiler
        # would give half of the loop's stages to them, and keys would come that much later.
        next_place = place + KEY_TILE
        next_block = tl.load(table + next_place // BLOCK_SIZE, mask=next_place < end, other=0)
        rows = keys + block * key_block_stride + slot * key_slot_stride
        key = load_rows(rows, inside, KEY_SIZE, KEY_PADDED, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores * scale)
        elif HAS_ALIBI:
            scores = scores * scale
        if HAS_ALIBI:
            scores += slope[:, None] * (place[None, :] - position[:, None]).to(tl.float32)
        if MASKED:
            visible = seen(place, inside, position, window, HAS_WINDOW, CAUSAL)
            scores = tl.where(visible, scores, -float("inf"))
        if IS_PLAIN:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = new_peak
        if MASKED:
            # A row that has seen no key yet: -inf minus -inf would be NaN.
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        if IS_PLAIN:
            weights = tl.exp2(scores * scale - shift[:, None])
        else:
            weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        rows = values + block * value_block_stride + slot * value_slot_stride
        value = load_rows(rows, inside, VALUE_SIZE, VALUE_PADDED, MASKED)
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(weights.to(value.dtype), value, accumulator, input_precision="ieee")
        peak = new_peak
    return accumulator, total, peak

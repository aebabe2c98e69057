"""Attention of a tile of queries to a range of keys, shared by decode and prefill.

A tile packs queries, each with the query heads of one KV head, into its rows, so that a key or
value is read once for the whole group.  The softmax is computed online (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018, section 3), in powers of two: ``peak`` is the
largest score so far, ``total`` the sum of ``2 ** (score - peak)``, and ``accumulator`` the values
with the same weights.

Invariants:

1. No slot and no table entry before ``begin`` or from ``end`` on is read; masked loads give 0.
   Every slot read has a key that some row of the tile attends to.
2. A row without keys so far has peak -inf, total 0 and accumulator 0.

Block ids are converted to 64 bits before strides are applied: pools exceed 2 ** 31 elements.
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
def converted(numbers, dtype: tl.constexpr):
    """Numbers of a pool in the dtype of queries: the same, or one that has each of them."""
    if numbers.dtype.is_int():
        numbers = numbers.to(tl.float32)
    return numbers.to(dtype)


@triton.jit
def load_scales(scales, place, inside, HAS_SCALES: tl.constexpr):
    """Scales ``[keys]`` at ``place`` of a pool of bytes; those of another are not used."""
    found = tl.full(place.shape, 1.0, tl.float32)
    if HAS_SCALES:
        found = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def ranged(values, scales, HAS_SCALES: tl.constexpr):
    """Values of bytes and their scales, such that float16 holds the scales times small weights.

    The largest float8 makes scales of 2 ** -16; a 256th of each number is exact.
    """
    if HAS_SCALES and values.dtype == tl.float16:
        values, scales = values * 0.00390625, scales * 256
    return values, scales


@triton.jit
def scaled(scores, scales, HAS_SCALES: tl.constexpr):
    """Scores ``[rows, keys]``, times what `load_scales` loaded."""
    if HAS_SCALES:
        scores *= scales[None, :]
    return scores


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
    """Which keys at ``place [keys]`` queries at ``position [rows]`` attend to; a mask of both."""
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
    cache_scales,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    scales_block_stride,
    scales_slot_stride,
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
    HAS_SCALES: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys at ``begin .. end`` to the online softmax of a tile.

    Args:
        accumulator: float32 ``[rows, VALUE_PADDED]``.
        total: float32 ``[rows]``.
        peak: float32 ``[rows]``.
        query: ``[rows, KEY_PADDED]``, columns past KEY_SIZE are 0.
        position: int32 ``[rows]``, position of each row's query.
        slope: float32 ``[rows]``, ALiBi slopes times log2(e).
        begin: first key.
        end: one past the last key; whole tiles from ``begin`` unless MASKED.
        table: block ids of the row.
        keys: pool of the keys, at the KV head.
        values: likewise for the values.
        cache_scales: scales of the pool's keys and values, at the KV head.
        key_block_stride: elements between blocks of keys.
        key_slot_stride: elements between slots of a block of keys.
        value_block_stride: likewise for values.
        value_slot_stride: likewise for values.
        scales_block_stride: likewise for scales.
        scales_slot_stride: likewise for scales.
        scale: factor from products to scores: to powers of two, or to units of the cap.
        softcap: the cap times log2(e).
        window: number of keys that a query attends to.
        KEY_SIZE: elements of a key.
        VALUE_SIZE: elements of a value.
        KEY_PADDED: power of two that holds a key.
        VALUE_PADDED: power of two that holds a value.
        BLOCK_SIZE: slots per block.
        KEY_TILE: keys per iteration.
        HAS_WINDOW: whether queries attend to only ``window`` keys.
        HAS_SOFTCAP: whether scores are capped.
        HAS_ALIBI: whether ``slope`` is used.
        HAS_SCALES: whether keys and values are bytes, multiples of ``cache_scales``.
        CAUSAL: whether queries do not attend to later keys.
        MASKED: whether some keys are masked for some row; otherwise no comparison is needed.

    Returns:
        accumulator, total, peak.
    """
    # Without cap or slopes the products are scaled in the exponent: one operation less.
    IS_PLAIN: tl.constexpr = not (HAS_SOFTCAP or HAS_ALIBI)
    offsets = tl.arange(0, KEY_TILE)
    next_place = begin + offsets
    next_block = tl.load(table + next_place // BLOCK_SIZE, mask=next_place < end, other=0)
    for start in tl.range(begin, end, KEY_TILE):
        # Computed from the loop variable, not carried along: that takes registers, in every layout
        # in
        # which positions are needed.
        place = start + offsets
        inside = place < end
        block, slot = next_block.to(tl.int64), place % BLOCK_SIZE
        # Block ids are loaded one tile ahead.  If they were loaded where they are used, the
        # compiler
        # would use half of the loop's stages for them, and keys would arrive that much later.
        next_place = place + KEY_TILE
        next_block = tl.load(table + next_place // BLOCK_SIZE, mask=next_place < end, other=0)
        rows = keys + block * key_block_stride + slot * key_slot_stride
        key = converted(load_rows(rows, inside, KEY_SIZE, KEY_PADDED, MASKED), query.dtype)
        # All scales before the first product: later, the values' take more registers.
        place_of_scales = block * scales_block_stride + slot * scales_slot_stride
        key_scales = load_scales(cache_scales, place_of_scales, inside, HAS_SCALES)
        value_scales = load_scales(cache_scales, place_of_scales + 1, inside, HAS_SCALES)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = scaled(scores, key_scales, HAS_SCALES)
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
            # A row without keys so far: -inf minus -inf would be NaN.
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        if IS_PLAIN:
            weights = tl.exp2(scores * scale - shift[:, None])
        else:
            weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        rows = values + block * value_block_stride + slot * value_slot_stride
        value = converted(load_rows(rows, inside, VALUE_SIZE, VALUE_PADDED, MASKED), query.dtype)
        value, value_scales = ranged(value, value_scales, HAS_SCALES)
        weights = scaled(weights, value_scales, HAS_SCALES)
        accumulator = accumulator * shrink[:, None]
        accumulator = tl.dot(weights.to(value.dtype), value, accumulator, input_precision="ieee")
        peak = new_peak
    return accumulator, total, peak

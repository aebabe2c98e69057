"""Writes of new keys and values into the cache, and moves of blocks, in Triton.

The functions of ``reference``.  A block is moved as whole 8-byte words, whatever its contents, so
one kernel copies within a pool, between pools, and between device and pinned host memory, which the
device accesses directly.

Cost: data is read once and written once; a copy in which a destination is also a source uses a
staging buffer and so does this twice.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pools import NUMBERS

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

# Words of 8 bytes per program: 16 bytes per thread and iteration, four iterations in flight.
WORDS = 1024
NUM_WARPS = 4
# Elements of keys per thread of `write_cache`.
ELEMENTS_PER_THREAD = 8
MAX_WARPS = 8


@triton.jit
def _levels(numbers, LIMIT: tl.constexpr, MANTISSA: tl.constexpr, LEAST_STEP: tl.constexpr):
    """Numbers of a type of bytes for float32 rows ``[n, size]``, and the scale of each row.

    A scale is the least bfloat16 that makes no number larger than LIMIT: the upper half of the
    float's bits, rounded up.  The type's numbers at ``2 ** e`` are ``2 ** (e - MANTISSA)`` apart,
    at least LEAST_STEP; those of int8, without MANTISSA, just that.
    """
    least = tl.div_rn(tl.max(tl.abs(numbers), 1), LIMIT)
    bits = (least.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale = bits.to(tl.float32, bitcast=True)
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    levels = tl.div_rn(numbers, tl.broadcast_to(divisor, numbers.shape))
    step = tl.full(numbers.shape, LEAST_STEP, tl.float32)
    if MANTISSA is not None:
        power = (levels.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(step, power * (2.0**-MANTISSA))
    # The last bit of such a sum is 1: it is rounded to the nearest integer, halves to even.
    return ((tl.div_rn(levels, step) + 12582912.0) - 12582912.0) * step, scale


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kernel(
    key,
    value,
    key_cache,
    value_cache,
    cache_scales,
    slot_mapping,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    scales_block_stride,
    scales_slot_stride,
    scales_head_stride,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    LIMIT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST_STEP: tl.constexpr,
):
    """One program per token; LIMIT is None of a cache without scales."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    key_dims, value_dims = tl.arange(0, KEY_PADDED)[None, :], tl.arange(0, VALUE_PADDED)[None, :]
    is_key = (heads < HEADS) & (key_dims < KEY_SIZE)
    is_value = (heads < HEADS) & (value_dims < VALUE_SIZE)

    # Both loads before the first store: the compiler cannot reorder them, as they may alias.
    key_rows = key + token * key_token_stride + heads * key_head_stride
    value_rows = value + token * value_token_stride + heads * value_head_stride
    keys = tl.load(key_rows + key_dims, mask=is_key, other=0.0)
    values = tl.load(value_rows + value_dims, mask=is_value, other=0.0)
    if LIMIT is not None:
        keys, key_scales = _levels(keys.to(tl.float32), LIMIT, MANTISSA, LEAST_STEP)
        values, value_scales = _levels(values.to(tl.float32), LIMIT, MANTISSA, LEAST_STEP)
        of_heads = cache_scales + block * scales_block_stride + offset * scales_slot_stride
        of_heads += tl.arange(0, HEADS_PADDED) * scales_head_stride
        is_head = tl.arange(0, HEADS_PADDED) < HEADS
        tl.store(of_heads, key_scales, is_head)
        tl.store(of_heads + 1, value_scales, is_head)
    key_rows = key_cache + block * key_block_stride + offset * key_slot_stride
    value_rows = value_cache + block * value_block_stride + offset * value_slot_stride
    tl.store(key_rows + heads * key_cache_head_stride + key_dims, keys, is_key)
    tl.store(value_rows + heads * value_cache_head_stride + value_dims, values, is_value)


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def _copy_kernel(
    source,
    destination,
    pairs,
    source_stride,
    destination_stride,
    num_words,
    WORDS: tl.constexpr,
):
    """Programs (pair, part of a block); strides and sizes in words."""
    num_pieces = tl.cdiv(num_words, WORDS)
    pair, piece = tl.program_id(0) // num_pieces, tl.program_id(0) % num_pieces
    source_block = tl.load(pairs + 2 * pair)
    destination_block = tl.load(pairs + 2 * pair + 1)
    word = piece * WORDS + tl.arange(0, WORDS)
    words = tl.load(source + source_block * source_stride + word, mask=word < num_words)
    tl.store(destination + destination_block * destination_stride + word, words, word < num_words)


def write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_scales: Tensor | None = None,
) -> None:
    """Write one step's keys and values into their slots.

    Args:
        key: ``[T, Hkv, D]``, any strides whose last is 1.
        value: ``[T, Hkv, Dv]``, likewise.
        key_cache: ``[num_blocks, block_size, Hkv, D]``, likewise; written in place.
        value_cache: ``[num_blocks, block_size, Hkv, Dv]``, likewise; written in place.
        slot_mapping: int64 ``[T]``; tokens with -1 are not written.
        cache_scales: ``[num_blocks, block_size, Hkv, 2]``, scales of keys and values in bytes (see
            ``pools``), written in place; None of floats.

    Raises:
        ValueError: tensors whose last dimension is not contiguous.
    """
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous")
    num_tokens, heads, key_size = key.shape
    if num_tokens == 0:
        return
    numbers = None if cache_scales is None else NUMBERS[key_cache.dtype]
    scales_strides = (0, 0, 0) if cache_scales is None else cache_scales.stride()[:3]
    heads_padded, key_padded = triton.next_power_of_2(heads), triton.next_power_of_2(key_size)
    warps = heads_padded * key_padded // (32 * ELEMENTS_PER_THREAD)
    _write_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        cache_scales,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *scales_strides,
        HEADS=heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value.shape[-1],
        BLOCK_SIZE=key_cache.shape[1],
        HEADS_PADDED=heads_padded,
        KEY_PADDED=key_padded,
        VALUE_PADDED=triton.next_power_of_2(value.shape[-1]),
        LIMIT=numbers and numbers.largest,
        MANTISSA=numbers and numbers.mantissa,
        LEAST_STEP=numbers and numbers.least_step,
        num_warps=min(max(warps, 1), MAX_WARPS),
        enable_fp_fusion=True,
    )


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copy blocks within one pool; all sources are read before a destination is written.

    Args:
        cache: ``[num_blocks, ...]``, each block contiguous, written in place.
        pairs: int64 ``[n, 2]``, rows of (source, destination); destinations are distinct.  In host
            memory the function checks whether a destination is also a source; on a device it does
            not synchronize, and the copy is staged.

    Raises:
        ValueError: blocks that are not contiguous or not whole words.
    """
    copy_layers([cache], pairs)


def copy_layers(
    caches: Sequence[Tensor],
    pairs: Tensor,
    to_device: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Copy the same blocks within each of several pools, as `copy_blocks` does within one.

    Chains are detected, and pairs copied to the device, once.

    Args:
        caches: pool of each layer, as for `copy_blocks`; all on one device.
        pairs: as for `copy_blocks`.
        to_device: copies pairs from host memory to the device; None uses torch's copy from pageable
            memory, which may synchronize with the stream.

    Raises:
        ValueError: blocks that are not contiguous or not whole words.
    """
    if pairs.shape[0] == 0:
        return
    is_staged = pairs.device.type == "cuda" or _is_chained(pairs)
    pairs = pairs.to(caches[0].device) if to_device is None else to_device(pairs)
    if not is_staged:
        for cache in caches:
            copy_words(cache, cache, pairs)
        return
    places = torch.arange(pairs.shape[0], device=pairs.device)
    gathered = torch.stack((pairs[:, 0], places), dim=1)
    scattered = torch.stack((places, pairs[:, 1]), dim=1)
    for cache in caches:
        staging = cache.new_empty((pairs.shape[0], *cache.shape[1:]))
        copy_words(cache, staging, gathered)
        copy_words(staging, cache, scattered)


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy blocks between pools on device and host, on the current stream.

    For many layers at a time, on a separate stream, see ``swap.BlockSwapper``.

    Args:
        source: ``[num_blocks, ...]``, each block contiguous; on the device or in pinned memory.
        destination: ``[num_blocks_there, ...]`` of the same block shape, likewise; written in
            place.
        pairs: int64 ``[n, 2]``, rows of (block in source, block in destination).

    Raises:
        ValueError: blocks that are not contiguous or not whole words.
    """
    if pairs.shape[0]:
        copy_words(source, destination, pairs)


def copy_words(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy blocks by pairs in one launch, in any order; no destination may be a source."""
    device = source.device if source.device.type == "cuda" else destination.device
    source, destination = _as_words(source), _as_words(destination)
    num_words = source.shape[1]
    _copy_kernel[(triton.cdiv(num_words, WORDS) * pairs.shape[0],)](
        source,
        destination,
        pairs.to(device).contiguous(),
        source.stride(0),
        destination.stride(0),
        num_words,
        WORDS=WORDS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def _as_words(pool: Tensor) -> Tensor:
    """A pool's blocks as int64 ``[num_blocks, words]``, the same memory."""
    if not pool[0].is_contiguous():
        raise ValueError(
            f"blocks {list(pool.shape[1:])} of strides {pool.stride()[1:]} are scattered"
        )
    num_bytes = pool[0].numel() * pool.element_size()
    if num_bytes % 8:
        raise ValueError(f"blocks of {num_bytes} bytes are not whole words of 8 bytes")
    return pool.flatten(1).view(torch.int64)


def _is_chained(pairs: Tensor) -> bool:
    """Whether a destination is also a source."""
    return bool(torch.isin(pairs[:, 1], pairs[:, 0]).any())

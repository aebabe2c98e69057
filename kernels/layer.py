"""Elementwise operations of a decoder layer between its products and attention, in Triton.

The functions of ``reference``.  Each is one launch over the output of a product, computed in
float32 and rounded once; in a decode step of few rows a launch costs more than its bytes, so
operations are fused.

Nothing here synchronizes with the device: launches depend on shapes alone and can be captured in a
CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

# Elements of each tensor per thread: 16 bytes in 16 bits.
ELEMENTS_PER_THREAD = 8
MAX_WARPS = 16
# Features per program of `swiglu`.
FEATURES = 1024


@triton.jit
def _add_norm_kernel(
    x, residual, output, weight, epsilon, SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    features = tl.arange(0, PADDED)
    inside = features < SIZE
    weights = tl.load(weight + features, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(x + row + features, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(residual + row + features, mask=inside, other=0.0).to(tl.float32) + added
    # The norm is that of the rounded sum, which the next addition reads.
    total = total.to(residual.dtype.element_ty)
    tl.store(residual + row + features, total, inside)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / SIZE + epsilon)
    tl.store(output + row + features, total * scale * weights, inside)


@triton.jit
def _rotate(
    source,
    target,
    inside,
    is_written,
    cosines,
    sines,
    weight,
    epsilon,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Normalize and rotate heads, from pointers ``source [n, 1]`` to ``target [n, 1]``.

    The two halves that are rotated with each other, and the rest, are separate tiles, so that a
    thread has both elements of a pair.
    """
    half = tl.arange(0, HALF_PADDED)[None, :]
    rest = tl.arange(0, REST_PADDED)[None, :] + 2 * HALF
    in_half, in_rest = half < HALF, rest < SIZE
    low = tl.load(source + half, mask=inside & in_half, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + half, mask=inside & in_half, other=0.0).to(tl.float32)
    if SIZE > 2 * HALF:
        tail = tl.load(source + rest, mask=inside & in_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low * low + high * high, 1)
        if SIZE > 2 * HALF:
            squares += tl.sum(tail * tail, 1)
        scale = tl.rsqrt(squares / SIZE + epsilon)[:, None]
        low *= scale * tl.load(weight + half, mask=in_half, other=0.0).to(tl.float32)
        high *= scale * tl.load(weight + HALF + half, mask=in_half, other=0.0).to(tl.float32)
        if SIZE > 2 * HALF:
            tail *= scale * tl.load(weight + rest, mask=in_rest, other=0.0).to(tl.float32)
    if HALF > 0:
        low_cosine = tl.load(cosines + half, mask=in_half, other=0.0).to(tl.float32)
        high_cosine = tl.load(cosines + HALF + half, mask=in_half, other=0.0).to(tl.float32)
        low_sine = tl.load(sines + half, mask=in_half, other=0.0).to(tl.float32)
        high_sine = tl.load(sines + HALF + half, mask=in_half, other=0.0).to(tl.float32)
        new_low = low * low_cosine - high * low_sine
        new_high = high * high_cosine + low * high_sine
        tl.store(target + half, new_low, is_written & in_half)
        tl.store(target + HALF + half, new_high, is_written & in_half)
    if SIZE > 2 * HALF:
        tl.store(target + rest, tail, is_written & in_rest)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _rotate_and_write_kernel(
    qkv,
    query,
    cosines,
    sines,
    key_cache,
    value_cache,
    slot_mapping,
    query_norm,
    key_norm,
    epsilon,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Programs (token, KV head): a key, a value and the queries of their group."""
    token, kv_head = tl.program_id(0).to(tl.int64) // KV_HEADS, tl.program_id(0) % KV_HEADS
    heads: tl.constexpr = GROUP * KV_HEADS
    row = qkv + token * (heads + 2 * KV_HEADS) * SIZE
    slot = tl.load(slot_mapping + token)
    num_written = (slot >= 0).to(tl.int32)  # keys and values written
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    cosines += token * 2 * HALF
    sines += token * 2 * HALF

    dims = tl.arange(0, SIZE_PADDED)
    value = tl.load(row + (heads + KV_HEADS + kv_head) * SIZE + dims, mask=dims < SIZE)
    place = value_cache + block * value_block_stride + offset * value_slot_stride
    tl.store(place + kv_head * value_head_stride + dims, value, dims < SIZE * num_written)

    key = tl.arange(0, 1)[:, None]
    place = key_cache + block * key_block_stride + offset * key_slot_stride
    _rotate(
        row + (heads + kv_head + key) * SIZE,
        place + (kv_head + key) * key_head_stride,
        key == 0,
        key < num_written,
        cosines,
        sines,
        key_norm,
        epsilon,
        SIZE,
        HALF,
        HALF_PADDED,
        REST_PADDED,
        HAS_NORM,
    )
    member = tl.arange(0, GROUP_PADDED)[:, None]
    inside = member < GROUP
    member += kv_head * GROUP
    _rotate(
        row + member * SIZE,
        query + (token * heads + member) * SIZE,
        inside,
        inside,
        cosines,
        sines,
        query_norm,
        epsilon,
        SIZE,
        HALF,
        HALF_PADDED,
        REST_PADDED,
        HAS_NORM,
    )


@triton.jit
def _swiglu_kernel(gate_up, output, size, FEATURES: tl.constexpr):
    """Programs (row, part of its features)."""
    num_pieces = tl.cdiv(size, FEATURES)
    row, piece = tl.program_id(0).to(tl.int64) // num_pieces, tl.program_id(0) % num_pieces
    features = piece * FEATURES + tl.arange(0, FEATURES)
    inside = features < size
    gates = gate_up + row * 2 * size
    gate = tl.load(gates + features, mask=inside).to(tl.float32)
    up = tl.load(gates + size + features, mask=inside).to(tl.float32)
    # A power that overflows gives 0, the limit for a large negative gate.
    tl.store(output + row * size + features, gate / (1 + tl.exp(-gate)) * up, inside)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Add to the residual stream, and normalize the sum by its root mean square.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    Args:
        x: ``[T, F]``, contiguous.
        residual: ``[T, F]``, likewise; becomes the sum.
        weight: ``[F]``.
        epsilon: added to the mean square.

    Returns:
        ``[T, F]``.

    Raises:
        ValueError: tensors that are not contiguous.
    """
    _check_contiguous(x=x, residual=residual, weight=weight)
    output = torch.empty_like(residual)
    num_rows, size = residual.shape
    padded = triton.next_power_of_2(size)
    if num_rows:
        _add_norm_kernel[(num_rows,)](
            x,
            residual,
            output,
            weight,
            epsilon,
            SIZE=size,
            PADDED=padded,
            num_warps=_num_warps(padded),
            enable_fp_fusion=True,
        )
    return output


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

    Rotary embedding: Su et al., "RoFormer", 2021, section 3.2.2, in the order of transformers:
    element i of the first half of the rotated elements is paired with element i of the second.

    Args:
        qkv: ``[T, (H + 2 Hkv) * D]``, contiguous: queries, keys, values.
        cosines: ``[T, rotary size]``, contiguous; elements of a head beyond that size are not
            rotated, and a size of 0 rotates nothing.
        sines: likewise.
        key_cache: ``[num_blocks, block_size, Hkv, D]``, any strides whose last is 1; written in
            place.
        value_cache: likewise.
        slot_mapping: int64 ``[T]``; keys and values of tokens with -1 are not written.
        query_norm: ``[D]``, weight of the norm that is applied to each query first.
        key_norm: the same for keys; both or none.
        epsilon: epsilon of these norms.

    Returns:
        The queries, ``[T, H, D]``.

    Raises:
        ValueError: strides, or a number of heads, that the kernel would read incorrectly.
    """
    _check_contiguous(qkv=qkv, cosines=cosines, sines=sines)
    num_tokens, width = qkv.shape
    block_size, kv_heads, size = key_cache.shape[1:]
    heads, remainder = divmod(width - 2 * kv_heads * size, size)
    rotary_size = cosines.shape[-1]
    if remainder or heads < kv_heads or heads % kv_heads:
        raise ValueError(
            f"rows of {width} elements are no queries, keys and values of {kv_heads} KV heads of "
            f"{size}, with as many or a multiple of query heads"
        )
    if rotary_size % 2 or rotary_size > size or sines.shape != cosines.shape:
        raise ValueError(
            f"cosines {list(cosines.shape)} and sines {list(sines.shape)} must be alike, of an "
            f"even number of elements, at most {size}"
        )
    is_scattered = (key_cache.stride(-1), value_cache.stride(-1)) != (1, 1)
    if value_cache.shape != key_cache.shape or is_scattered:
        raise ValueError("keys and values must have one shape, and a contiguous last dimension")
    if (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm and key_norm must both be given, or none of them")
    group, half = heads // kv_heads, rotary_size // 2
    group_padded = triton.next_power_of_2(group)
    half_padded = triton.next_power_of_2(max(half, 1))
    query = qkv.new_empty(num_tokens, heads, size)
    if num_tokens:
        _rotate_and_write_kernel[(num_tokens * kv_heads,)](
            qkv,
            query,
            cosines,
            sines,
            key_cache,
            value_cache,
            slot_mapping,
            query_norm,
            key_norm,
            epsilon,
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            GROUP=group,
            KV_HEADS=kv_heads,
            SIZE=size,
            HALF=half,
            BLOCK_SIZE=block_size,
            GROUP_PADDED=group_padded,
            SIZE_PADDED=triton.next_power_of_2(size),
            HALF_PADDED=half_padded,
            REST_PADDED=triton.next_power_of_2(max(size - rotary_size, 1)),
            HAS_NORM=query_norm is not None,
            num_warps=_num_warps(group_padded * half_padded),
            enable_fp_fusion=True,
        )
    return query


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``: Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.

    Args:
        gate_up: ``[T, 2 F]``, contiguous: gates, then ups.

    Returns:
        ``[T, F]``.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    _check_contiguous(gate_up=gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_rows, size)
    if num_rows:
        _swiglu_kernel[(num_rows * triton.cdiv(size, FEATURES),)](
            gate_up,
            output,
            size,
            FEATURES=FEATURES,
            num_warps=_num_warps(FEATURES),
            enable_fp_fusion=True,
        )
    return output


def _num_warps(num_elements: int) -> int:
    """Warps per program, for a power of two of elements."""
    return min(max(num_elements // (32 * ELEMENTS_PER_THREAD), 1), MAX_WARPS)


def _check_contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous; {list(tensor.shape)} has strides {tensor.stride()}"
            )

"""LoRA adapters' contribution to a linear layer or an embedding, in Triton.

Each adapter has a slot, and the rows of a batch are sorted by slot in ``order``.  *Shrink*
multiplies rows by the ``a`` of their adapter, *expand* multiplies the result by ``b``, and adds it
to the output in place.  Fused layers are slices of one launch.

Invariants:

1. Grids depend on shapes alone, not on the rows' adapters: tiles of rows are numbered over all
   slots, up to the maximum, and unused ones end at once.  So both launches can be captured in a
   CUDA graph.
2. Sums are float32, in one order for one shape: shrink writes a sum for each split of the depth,
   and expand adds them up; no sum is accumulated by two programs.
3. Contents of a slot beyond its rank are 0, and mostly not read; rows without an adapter are not
   modified.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import multiprocessors, padded

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

# Rows of a tile in batches of up to this many rows, where most tiles are not full, and in others;
# few for float32, whose products take registers.
FEW_ROWS = 256
SMALL_TILE, LARGE_TILE = 16, 64
# Per tile: ranks, bytes of the depth loaded at a time, and bytes of features.
RANKS = 64
DEPTH_BYTES = 128
FEATURE_BYTES = 128
# Minimum depth of a split; less would end before the next launch has started.
TILES_PER_SPLIT = 4
NUM_STAGES = 3


@triton.jit
def _rows_of_tile(
    starts, tile, NUM_SLOTS: tl.constexpr, SLOTS_PADDED: tl.constexpr, ROWS: tl.constexpr
):
    """Slot of a tile of rows, and its range in the order; an empty range for no slot."""
    slots = tl.arange(0, SLOTS_PADDED)
    begin = tl.load(starts + slots, mask=slots < NUM_SLOTS, other=0)
    end = tl.load(starts + slots + 1, mask=slots < NUM_SLOTS, other=0)
    num_tiles = (end - begin + ROWS - 1) // ROWS
    next_tile = tl.cumsum(num_tiles, 0)
    slot = tl.sum((next_tile <= tile).to(tl.int32), 0)
    is_it = slots == slot
    first = tl.sum(tl.where(is_it, begin + (tile - next_tile + num_tiles) * ROWS, 0), 0)
    return slot, first, tl.sum(tl.where(is_it, end, 0), 0)


@triton.jit
def _features_of_tile(features, tile, NUM_SLICES: tl.constexpr, FEATURES: tl.constexpr):
    """Slice of a tile of features, its start and the slice's end; an empty range for no slice."""
    piece, begin, end = 0, 0, 0
    for number in tl.static_range(NUM_SLICES):
        its_begin = tl.load(features + number)
        its_end = tl.load(features + number + 1)
        num_tiles = (its_end - its_begin + FEATURES - 1) // FEATURES
        is_it = (tile >= 0) & (tile < num_tiles)
        piece = tl.where(is_it, number, piece)
        begin = tl.where(is_it, its_begin + tile * FEATURES, begin)
        end = tl.where(is_it, its_end, end)
        tile -= num_tiles
    return piece, begin, end


@triton.jit(do_not_specialize=["num_rows", "split_tiles"])
def _shrink_kernel(
    x,
    a,
    ranks,
    starts,
    order,
    hidden,
    num_rows,
    x_stride,
    split_tiles,
    DEPTH: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
):
    """Programs (tile of rows; slice and tile of its ranks; split of the depth)."""
    slot, first, end = _rows_of_tile(starts, tl.program_id(0), NUM_SLOTS, SLOTS_PADDED, ROWS)
    if first >= end:
        return
    rank_tiles: tl.constexpr = (MAX_RANK + RANKS - 1) // RANKS
    piece = tl.program_id(1) // rank_tiles
    rank = tl.program_id(1) % rank_tiles * RANKS + tl.arange(0, RANKS)
    in_rank = rank < tl.load(ranks + slot * NUM_SLICES + piece)
    place = first + tl.arange(0, ROWS)
    inside = place < end
    row = tl.load(order + place, mask=inside, other=0).to(tl.int64)
    adapter = (slot.to(tl.int64) * NUM_SLICES + piece) * MAX_RANK
    xs = x + row[:, None] * x_stride
    weights = a + (adapter + rank)[:, None] * DEPTH
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    split = tl.program_id(2)
    last_tile = tl.minimum((split + 1) * split_tiles, (DEPTH + DEPTH_TILE - 1) // DEPTH_TILE)
    for tile in tl.range(split * split_tiles, last_tile):
        depth = tile * DEPTH_TILE + tl.arange(0, DEPTH_TILE)
        in_depth = (depth < DEPTH)[None, :]
        numbers = tl.load(xs + depth[None, :], mask=inside[:, None] & in_depth, other=0.0)
        weight = tl.load(weights + depth[None, :], mask=in_rank[:, None] & in_depth, other=0.0)
        sums = tl.dot(numbers, tl.trans(weight), sums, input_precision="ieee")
    line = (split.to(tl.int64) * num_rows + place) * NUM_SLICES + piece
    # All ranks, 0 beyond the adapter's: a mask known only on the device would split the stores.
    written = inside[:, None] & (rank < MAX_RANK)[None, :]
    tl.store(hidden + line[:, None] * MAX_RANK + rank[None, :], sums, written)


@triton.jit
def _look_up_kernel(
    ids,
    table,
    starts,
    order,
    hidden,
    num_tokens,
    NUM_SLOTS: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Programs (tile of rows): hidden numbers of an embedding, which are rows of its ``a``."""
    slot, first, end = _rows_of_tile(starts, tl.program_id(0), NUM_SLOTS, SLOTS_PADDED, ROWS)
    if first >= end:
        return
    rank = tl.arange(0, RANK_PADDED)[None, :]
    place = first + tl.arange(0, ROWS)
    inside = place < end
    row = tl.load(order + place, mask=inside, other=0)
    token = tl.load(ids + row, mask=inside, other=0).to(tl.int64)
    lines = table + (slot.to(tl.int64) * num_tokens + token)[:, None] * MAX_RANK
    wanted = inside[:, None] & (rank < MAX_RANK)
    numbers = tl.load(lines + rank, mask=wanted, other=0.0).to(tl.float32)
    tl.store(hidden + place.to(tl.int64)[:, None] * MAX_RANK + rank, numbers, wanted)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _expand_kernel(
    output,
    hidden,
    b,
    ranks,
    features,
    starts,
    order,
    num_rows,
    num_splits,
    output_stride,
    NUM_FEATURES: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Programs (tile of rows, tile of the features of a slice)."""
    slot, first, end = _rows_of_tile(starts, tl.program_id(0), NUM_SLOTS, SLOTS_PADDED, ROWS)
    if first >= end:
        return
    piece, begin, last = _features_of_tile(features, tl.program_id(1), NUM_SLICES, FEATURES)
    num_ranks = tl.load(ranks + slot * NUM_SLICES + piece)
    if (begin >= last) | (num_ranks == 0):
        return
    place = first + tl.arange(0, ROWS)
    inside = (place < end)[:, None]
    row = tl.load(order + place, mask=place < end, other=0).to(tl.int64)
    feature = begin + tl.arange(0, FEATURES)
    in_slice = feature < last
    lines = hidden + (place.to(tl.int64) * NUM_SLICES + piece)[:, None] * MAX_RANK
    weights = b + (slot.to(tl.int64) * NUM_FEATURES + feature)[:, None] * MAX_RANK
    split_stride = num_rows * NUM_SLICES * MAX_RANK
    sums = tl.zeros([ROWS, FEATURES], tl.float32)
    for start in tl.range(0, num_ranks, RANKS):
        rank = start + tl.arange(0, RANKS)[None, :]
        in_rank = rank < MAX_RANK
        numbers, source = tl.zeros([ROWS, RANKS], tl.float32), lines + rank
        for _ in tl.range(0, num_splits):
            numbers += tl.load(source, mask=inside & in_rank, other=0.0)
            source += split_stride
        weight = tl.load(weights + rank, mask=in_slice[:, None] & in_rank, other=0.0)
        sums = tl.dot(numbers.to(weight.dtype), tl.trans(weight), sums, input_precision="ieee")
    to = output + row[:, None] * output_stride + feature[None, :]
    changed = inside & in_slice[None, :]
    tl.store(to, tl.load(to, mask=changed, other=0.0).to(tl.float32) + sums, changed)


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

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, equation 3, with the
    factor included in ``b``.

    Args:
        output: ``[T, N]``, output of fused linear layers; modified in place.
        x: ``[T, K]``, input of the layers.
        a: ``[num_slots, slices, R, K]``, a slice for each layer; undefined beyond a rank.
        b: ``[num_slots, N, R]``, 0 beyond a rank.
        ranks: int32 ``[num_slots, slices]``, at most R, 0 for none.
        features: int32 ``[slices + 1]``, start of each slice's features, and N.
        starts: int32 ``[num_slots + 1]``, start of each slot's rows in ``order``.
        order: int32 ``[T]``, rows by slot; undefined past the last start.

    Raises:
        ValueError: tensors that the kernels would read incorrectly.
    """
    num_rows, depth = x.shape
    num_slots, num_slices, max_rank, _ = a.shape
    _check(output, b, starts, x=x, a=a, ranks=ranks, features=features, order=order)
    if a.shape[-1] != depth or a.shape[2] != b.shape[-1]:
        raise ValueError(f"a {list(a.shape)} and b {list(b.shape)} change no rows of {depth}")
    if num_rows == 0:
        return
    tile, num_tiles = _row_tiles(num_rows, num_slots, x.dtype)
    ranks_tile = min(padded(max_rank), RANKS)
    num_pieces = num_slices * triton.cdiv(max_rank, ranks_tile)
    depth_tile = DEPTH_BYTES // x.element_size()
    num_depth_tiles = triton.cdiv(depth, depth_tile)
    split_tiles = _split_tiles(num_depth_tiles, num_tiles * num_pieces, multiprocessors(x.device))
    num_splits = triton.cdiv(num_depth_tiles, split_tiles)
    hidden = x.new_empty(num_splits, num_rows, num_slices, max_rank, dtype=torch.float32)
    _shrink_kernel[(num_tiles, num_pieces, num_splits)](
        x,
        a,
        ranks,
        starts,
        order,
        hidden,
        num_rows,
        x.stride(0),
        split_tiles,
        DEPTH=depth,
        NUM_SLOTS=num_slots,
        SLOTS_PADDED=triton.next_power_of_2(num_slots),
        NUM_SLICES=num_slices,
        MAX_RANK=max_rank,
        ROWS=tile,
        RANKS=ranks_tile,
        DEPTH_TILE=depth_tile,
        num_warps=_num_warps(tile),
        num_stages=NUM_STAGES,
        enable_fp_fusion=True,
    )
    _expand(output, hidden, b, ranks, features, starts, order)


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

    Raises:
        ValueError: tensors that the kernels would read incorrectly.
    """
    num_slots, num_tokens, max_rank = table.shape
    _check(output, b, starts, ids=ids, table=table, ranks=ranks, features=features, order=order)
    if len(ids) == 0:
        return
    tile, num_tiles = _row_tiles(len(ids), num_slots, table.dtype)
    hidden = output.new_empty(1, len(ids), 1, max_rank, dtype=torch.float32)
    _look_up_kernel[(num_tiles,)](
        ids,
        table,
        starts,
        order,
        hidden,
        num_tokens,
        NUM_SLOTS=num_slots,
        SLOTS_PADDED=triton.next_power_of_2(num_slots),
        MAX_RANK=max_rank,
        RANK_PADDED=triton.next_power_of_2(max_rank),
        ROWS=tile,
        num_warps=_num_warps(tile),
        enable_fp_fusion=True,
    )
    _expand(output, hidden, b, ranks, features, starts, order)


def _expand(
    output: Tensor,
    hidden: Tensor,
    b: Tensor,
    ranks: Tensor,
    features: Tensor,
    starts: Tensor,
    order: Tensor,
) -> None:
    """The second product, from hidden numbers ``[splits, T, slices, R]``."""
    num_splits, num_rows, num_slices, max_rank = hidden.shape
    num_slots, num_features, _ = b.shape
    tile, num_tiles = _row_tiles(num_rows, num_slots, b.dtype)
    feature_tile = FEATURE_BYTES // b.element_size()
    # A slice may end in a partial tile.
    num_feature_tiles = num_features // feature_tile + num_slices
    _expand_kernel[(num_tiles, num_feature_tiles)](
        output,
        hidden,
        b,
        ranks,
        features,
        starts,
        order,
        num_rows,
        num_splits,
        output.stride(0),
        NUM_FEATURES=num_features,
        NUM_SLOTS=num_slots,
        SLOTS_PADDED=triton.next_power_of_2(num_slots),
        NUM_SLICES=num_slices,
        MAX_RANK=max_rank,
        ROWS=tile,
        RANKS=min(padded(max_rank), RANKS),
        FEATURES=feature_tile,
        num_warps=_num_warps(tile),
        num_stages=NUM_STAGES,
        enable_fp_fusion=True,
    )


def _row_tiles(num_rows: int, num_slots: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows per tile, and the maximum number of tiles for any distribution of slots."""
    has_small_tiles = num_rows <= FEW_ROWS or dtype == torch.float32
    tile = SMALL_TILE if has_small_tiles else LARGE_TILE
    num_groups = min(num_slots, num_rows)
    return tile, (num_rows + num_groups * (tile - 1)) // tile


def _num_warps(tile: int) -> int:
    return 4 if tile == SMALL_TILE else 8


def _split_tiles(num_tiles: int, num_programs: int, num_multiprocessors: int) -> int:
    """Tiles of a split of the depth, for two programs per multiprocessor."""
    wanted = max(1, 2 * num_multiprocessors // num_programs)
    return max(-(-num_tiles // wanted), TILES_PER_SPLIT)


def _check(output: Tensor, b: Tensor, starts: Tensor, **others: Tensor) -> None:
    for name, tensor in (("output", output), ("b", b), ("starts", starts), *others.items()):
        # Only the rows of these are read contiguously.
        checked = tensor[:1] if name in {"x", "output"} else tensor
        if not checked.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous; {list(tensor.shape)} has strides {tensor.stride()}"
            )
    order = others["order"]
    if output.shape != (len(order), b.shape[1]) or starts.shape != (len(b) + 1,):
        raise ValueError(
            f"output {list(output.shape)} must have a row for each of {len(order)} in order, with "
            f"the features of b {list(b.shape)}, and starts {list(starts.shape)} one more than b "
            "has slots"
        )

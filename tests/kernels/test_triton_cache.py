"""Triton's cache writes, copies and swaps against the reference, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedserve.device import cuda_of
from pagedserve.kernels import reference

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.kernels import swap
from pagedserve.kernels.cache import copy_blocks, copy_layers, swap_blocks, write_cache
from pagedserve.kernels.swap import BlockSwapper, runs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NUM_BLOCKS = 6
NUM_SLOTS = NUM_BLOCKS * 16
# Slots in any order, and tokens without one.
slot_mappings = st.lists(st.integers(-NUM_SLOTS // 3, NUM_SLOTS - 1), max_size=15, unique=True).map(
    lambda slots: [max(slot, -1) for slot in slots]
)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal, and NaN where NaN is."""
    assert torch.equal(got.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


def numbered(num_blocks: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """A pool whose elements tell blocks apart."""
    return torch.randn(num_blocks, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([1, 3, 8]),
    sizes=st.sampled_from([(64, 64), (80, 48), (128, 128)]),
    heads_first=st.booleans(),
    slots=slot_mappings,
)
def test_write_cache(
    device: torch.device,
    *,
    dtype: torch.dtype,
    heads: int,
    sizes: tuple[int, int],
    heads_first: bool,
    slots: list[int],
) -> None:
    key_size, value_size = sizes
    pool = torch.full((NUM_BLOCKS, 16, heads, key_size + value_size), torch.nan, dtype=dtype)
    expected = pool.clone()
    if heads_first:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    pool = pool.to(device)
    key = torch.randn(len(slots), heads, key_size).to(dtype)
    value = torch.randn(heads, len(slots), value_size).to(dtype).transpose(0, 1)
    mapping = torch.tensor(slots, dtype=torch.int64)
    caches = pool[..., :key_size], pool[..., key_size:]
    write_cache(key.to(device), value.to(device), *caches, mapping.to(device))
    caches = expected[..., :key_size], expected[..., key_size:]
    reference.write_cache(key, value, *caches, mapping)
    assert_same_bits(pool.contiguous(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [[0, 5]],
        [[0, 1], [0, 2], [4, 3]],
        [[0, 1], [1, 2], [2, 0]],
        [[3, 3]],
        [[5, 4], [4, 3], [3, 2], [2, 1], [1, 0]],
    ],
)
@pytest.mark.parametrize("on_device", [False, True])
def test_copy_reads_all_sources_before_it_writes(
    device: torch.device, dtype: torch.dtype, pairs: list[list[int]], on_device: bool
) -> None:
    moves = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    expected = numbered(NUM_BLOCKS, dtype, 16, 3, 72)
    cache = expected.clone().to(device)
    copy_blocks(cache, moves.to(device) if on_device else moves)
    reference.copy_blocks(expected, moves)
    assert_same_bits(cache, expected)


@pytest.mark.parametrize("pairs", [[[0, 5], [2, 1]], [[1, 2], [2, 0]], []])
def test_layers_are_copied_alike(device: torch.device, pairs: list[list[int]]) -> None:
    moves = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    expected = [
        numbered(NUM_BLOCKS, torch.float16, 16, 2, 24),
        numbered(NUM_BLOCKS, torch.float32, 16, 3, 160),
    ]
    caches = [cache.clone().to(device) for cache in expected]
    copy_layers(caches, moves)
    for cache, wanted in zip(caches, expected, strict=True):
        reference.copy_blocks(wanted, moves)
        assert_same_bits(cache, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swap_between_device_and_host(device: torch.device, dtype: torch.dtype) -> None:
    there = numbered(NUM_BLOCKS, dtype, 16, 2, 80).to(device)
    host = torch.zeros(4, 16, 2, 80, dtype=dtype, pin_memory=device.type == "cuda")
    expected = torch.zeros(4, 16, 2, 80, dtype=dtype)
    out = torch.tensor([[5, 0], [1, 3]])
    swap_blocks(there, host, out)
    if device.type == "cuda":
        torch.cuda.synchronize()
    reference.swap_blocks(there.cpu(), expected, out)
    assert_same_bits(host, expected)
    back = torch.tensor([[0, 2], [3, 0]])
    swap_blocks(host, there, back)
    assert_same_bits(there[[2, 0]], expected[[0, 3]])
    assert_same_bits(there[[5, 1]], expected[[0, 3]])


def test_blocks_that_cannot_be_moved_are_named(device: torch.device) -> None:
    pairs = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="scattered"):
        copy_blocks(torch.zeros(4, 16, 8, device=device)[:, :, ::2], pairs)
    with pytest.raises(ValueError, match="6 bytes"):
        copy_blocks(torch.zeros(4, 3, dtype=torch.float16, device=device), pairs)
    with pytest.raises(ValueError, match="last dimension of key "):
        write_cache(
            torch.zeros(1, 8, 2, device=device).transpose(1, 2),
            torch.zeros(1, 2, 8, device=device),
            torch.zeros(1, 16, 2, 8, device=device),
            torch.zeros(1, 16, 2, 8, device=device),
            torch.tensor([0], device=device),
        )


@pytest.mark.parametrize("staged_blocks", [1, 2, 100])
def test_swapper_moves_all_layers_out_and_in(
    device: torch.device, staged_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = [
        numbered(9, torch.float16, 16, 2, 24).to(device),
        numbered(9, torch.float32, 16, 3, 160).to(device),  # more than one program's piece
    ]
    block_bytes = sum(pool[0].numel() * pool.element_size() for pool in pools)
    monkeypatch.setattr(swap, "STAGING_BYTES", staged_blocks * block_bytes)
    swapper = BlockSwapper(pools, 7, cuda_of(device))
    before = [pool.clone() for pool in pools]
    swapper.swap_out(torch.tensor([[0, 3], [4, 4], [7, 6], [8, 0], [1, 1]]))
    for pool in pools:
        pool[[0, 4]] = torch.nan  # queued after the swap, so the host has what was there before
    swapper.wait()
    for layer, pool in enumerate(before):
        assert_same_bits(swapper.host_pool(layer)[[3, 4, 6, 0, 1]], pool[[0, 4, 7, 8, 1]])
    swapper.swap_in(torch.tensor([[3, 5], [4, 6], [6, 0]]))
    for pool, old in zip(pools, before, strict=True):
        assert_same_bits(pool[[5, 6, 0]], old[[0, 4, 7]])
        assert_same_bits(pool[[1, 2, 3, 7, 8]], old[[1, 2, 3, 7, 8]])


def test_swapper_refuses_blocks_that_it_would_tear(device: torch.device) -> None:
    with pytest.raises(ValueError, match="scattered or no multiple of 16 bytes"):
        BlockSwapper([torch.zeros(4, 3, device=device)], 2)


def test_runs_are_whole_and_in_order() -> None:
    assert list(runs([4, 5, 6, 2, 9, 10])) == [
        (slice(0, 3), slice(4, 7)),
        (slice(3, 4), slice(2, 3)),
        (slice(4, 6), slice(9, 11)),
    ]
    assert list(runs([])) == []

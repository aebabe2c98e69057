"""Keys and values in bytes: Triton's writes bit for bit, its attention against float64."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedserve.config.cache import KVCacheDtype
from pagedserve.kernels import reference
from pagedserve.kernels.pools import PoolParts, pool_parts
from tests.kernels.test_triton_attention import TOLERANCE, alibi_slopes, dtypes_of
from tests.support.rounding_cache import LEVELS, rounded

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.kernels.attention import paged_attention
from pagedserve.kernels.cache import write_cache

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS = 6, 16, 2
SIZES = [(64, 64), (80, 48), (128, 128)]
NUM_KEYS, TABLE = 45, torch.tensor([[4, 0, 2]], dtype=torch.int32)


def poisoned_pool(
    cache_dtype: KVCacheDtype, sizes: tuple[int, int], device: torch.device
) -> Tensor:
    """A pool of NaN, or of the bytes of one."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, sum(sizes) + 4)
    return torch.full(shape, 0xFF, dtype=torch.uint8, device=device).view(LEVELS[cache_dtype][0])


def written(
    parts: PoolParts, tokens: tuple[Tensor, Tensor], slots: Tensor, cache_dtype: KVCacheDtype
) -> tuple[Tensor, Tensor]:
    """Write keys and values, and compare what lies in the pool with the definition."""
    assert parts.scales is not None
    write_cache(*tokens, parts.keys, parts.values, slots, cache_scales=parts.scales)
    exact = []
    for number, (given, stored) in enumerate(zip(tokens, (parts.keys, parts.values), strict=True)):
        levels = stored.cpu().float().flatten(0, 1)[slots.cpu()]
        scales = parts.scales.cpu().float().flatten(0, 1)[slots.cpu()]
        found = torch.where(scales[..., number, None] > 0, levels * scales[..., number, None], 0)
        assert torch.equal(found, rounded(given.cpu(), cache_dtype))
        exact.append(found)
    return exact[0], exact[1]


@cache
def sequence(
    cache_dtype: KVCacheDtype, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[PoolParts, tuple[Tensor, Tensor]]:
    """A pool with the keys and values of one sequence, and their exact values; both only read."""
    parts = pool_parts(poisoned_pool(cache_dtype, sizes, device), sizes[0])
    generator = torch.Generator().manual_seed(0)
    shapes = [(NUM_KEYS, KV_HEADS, size) for size in sizes]
    key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    places = torch.arange(NUM_KEYS)
    slots = TABLE[0].long()[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    exact = written(parts, (key, value), slots.to(device), cache_dtype)
    keys, values = (torch.zeros(NUM_BLOCKS, BLOCK_SIZE, *shape[1:]).double() for shape in shapes)
    reference.write_cache(exact[0].double(), exact[1].double(), keys, values, slots)
    return parts, (keys, values)


@pytest.mark.parametrize("cache_dtype", LEVELS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_writes(
    device: torch.device, cache_dtype: KVCacheDtype, sizes: tuple[int, int], spread: float
) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        pool = poisoned_pool(cache_dtype, sizes, device)
        before = pool.view(torch.uint8).clone()
        slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:9]
        # Of some rows the numbers differ by many powers of two, down to those that become 0.
        tokens = [torch.randn(9, KV_HEADS, size) for size in sizes]
        tokens = [(2 ** (spread * torch.randn_like(rows)) * rows).to(dtype) for rows in tokens]
        tokens[0][3] = 0
        key, value = (rows.to(device) for rows in tokens)
        parts = pool_parts(pool, sizes[0])
        written(parts, (key, value), slots.to(device), cache_dtype)
        other = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        other[slots] = False
        unwritten = pool_parts(before.view(pool.dtype), sizes[0])
        for part, same in zip(parts, unwritten, strict=True):
            assert part is not None
            assert same is not None
            rows, old = (tensor.flatten(0, 1)[other.to(device)] for tensor in (part, same))
            assert torch.equal(rows.view(torch.uint8), old.view(torch.uint8))


def test_a_token_without_a_slot_is_not_written(device: torch.device) -> None:
    pool = poisoned_pool("int8", (64, 64), device)
    parts, row = pool_parts(pool, 64), torch.ones(1, KV_HEADS, 64, device=device)
    slots = torch.tensor([-1], device=device)
    write_cache(row, row, parts.keys, parts.values, slots, cache_scales=parts.scales)
    assert (pool.view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("cache_dtype", LEVELS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("queries", "is_plain"), [(1, True), (1, False), (5, True), (40, False)])
def test_attention(
    device: torch.device,
    cache_dtype: KVCacheDtype,
    sizes: tuple[int, int],
    queries: int,
    is_plain: bool,
) -> None:
    torch.manual_seed(0)
    num_heads = 2 * KV_HEADS
    for dtype in dtypes_of(device):
        parts, (keys, values) = sequence(cache_dtype, sizes, dtype, device)
        query = torch.randn(queries, num_heads, sizes[0]).to(dtype)
        options: dict[str, Any] = {"scale": sizes[0] ** -0.5}
        arguments: dict[str, Any] = {
            "block_tables": TABLE,
            "query_start": torch.tensor([0, queries], dtype=torch.int32),
            "seq_lens": torch.tensor([NUM_KEYS], dtype=torch.int32),
        }
        if not is_plain:
            options |= {"window": 20, "softcap": 1.5}
            arguments["alibi"] = alibi_slopes(num_heads, torch.device("cpu"))
        expected = reference.paged_attention(query.double(), keys, values, **arguments, **options)
        found = paged_attention(
            query.to(device),
            parts.keys,
            parts.values,
            cache_scales=parts.scales,
            **{name: tensor.to(device) for name, tensor in arguments.items()},
            **options,
        )
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)

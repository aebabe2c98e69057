"""Triton's paged attention against the reference in float64, over poisoned pools and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedserve.kernels import reference
from tests.support.examples import examples

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.kernels.attention import paged_attention
from pagedserve.kernels.decode import MAX_SPLITS, num_splits
from pagedserve.kernels.tuning import config_for

Row = tuple[int, int]  # cached keys, queries

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
POISONED_IDS = (2**31 - 1, -1, -(2**31), 10**6)
SPARE_BLOCKS = 3
SPARE_TOKENS = 2


def dtypes_of(device: torch.device) -> list[torch.dtype]:
    """The interpreter multiplies bfloat16 matrices wrongly."""
    floats = [torch.float32, torch.float16]
    return floats if device.type == "cpu" else [*floats, torch.bfloat16]


class Batch:
    """Rows over a pool in which only visible slots hold numbers.

    Everything else is poisoned: NaN in the other slots, table entries that name no block, NaN in
    the output and in queries that no row has.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_heads: int = 2,
        group: int = 2,
        key_size: int = 64,
        value_size: int | None = None,
        block_size: int = 16,
        shared_blocks: int = 0,
        heads_first: bool = False,
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        value_size = value_size or key_size
        rows = [(cached, queries) if queries else (0, 0) for cached, queries in rows]
        lengths = [cached + queries for cached, queries in rows]
        counts = [-(-length // block_size) for length in lengths]
        num_blocks = sum(counts) + SPARE_BLOCKS
        ids = torch.randperm(num_blocks, generator=generator).int()
        tables = torch.zeros(len(rows), max(counts) + 2, dtype=torch.int32)
        poison = torch.tensor(POISONED_IDS, dtype=torch.int32)
        poisoned = poison[torch.randint(len(poison), tables.shape, generator=generator)]
        shape = (num_blocks, block_size, kv_heads, key_size + value_size)
        pool = torch.full(shape, torch.nan, dtype=dtype)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            tables[row, :count] = ids[sum(counts[:row]) :][:count]
            # Rows share their first blocks where both have them cached.
            shared = min(shared_blocks, counts[0], rows[row][0] // block_size)
            if rows[0][0] >= shared * block_size:
                tables[row, :shared] = tables[0, :shared]
            first = 0 if window is None else max(rows[row][0] - window + 1, 0)
            visible = torch.arange(first, length)
            blocks, slots = tables[row, visible // block_size].long(), visible % block_size
            old = pool[blocks, slots]
            new = torch.randn(len(visible), *shape[2:], generator=generator).to(dtype)
            pool[blocks, slots] = torch.where(old.isnan(), new, old)
            used = slice(first // block_size, count)
            poisoned[row, used] = tables[row, used]
        if heads_first:
            pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
        pool = pool.to(device)
        self.key_cache, self.value_cache = pool[..., :key_size], pool[..., key_size:]
        self.num_tokens = sum(queries for _, queries in rows)
        query = torch.randn(
            self.num_tokens + SPARE_TOKENS, kv_heads * group, key_size, generator=generator
        )
        query[self.num_tokens :] = torch.nan
        self.query = query.to(device, dtype)
        starts = [sum(queries for _, queries in rows[:row]) for row in range(len(rows) + 1)]
        self.tables, self.poisoned = tables.to(device), poisoned.to(device)
        self.query_start = torch.tensor(starts, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.options: dict[str, Any] = {"scale": key_size**-0.5, "window": window}
        self.bounds: dict[str, int] = {
            "max_query_len": max(queries for _, queries in rows),
            "max_seq_len": max(lengths),
        }

    def compare(self, **options: Any) -> None:
        """Both functions, and what must not have been written."""
        options = {**self.options, **options}
        options |= {"query_start": self.query_start, "seq_lens": self.seq_lens}
        output = torch.full(
            (*self.query.shape[:2], self.value_cache.shape[-1]),
            torch.nan,
            dtype=self.query.dtype,
            device=self.query.device,
        )
        result = paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            block_tables=self.poisoned,
            output=output,
            **{**self.bounds, **options},
        )
        expected = reference.paged_attention(
            self.query.double(),
            self.key_cache.double().nan_to_num(),
            self.value_cache.double().nan_to_num(),
            block_tables=self.tables,
            **options,
        )
        assert result is output
        assert result[self.num_tokens :].isnan().all()
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(
            result[: self.num_tokens].double(),
            expected[: self.num_tokens],
            rtol=tolerance,
            atol=tolerance,
        )


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.5, 0.004, num_heads, device=device)


@dataclass(frozen=True)
class Shape:
    """What a GPU compiles the kernels for, and the numbers that go with it."""

    heads: tuple[int, int]
    sizes: tuple[int, int]
    block_size: int
    window: int | None
    softcap: float | None
    with_sinks: bool
    with_alibi: bool
    dtype: torch.dtype
    causal: bool = True

    def compare(
        self,
        device: torch.device,
        rows: Sequence[Row],
        *,
        shared_blocks: int,
        heads_first: bool,
    ) -> None:
        batch = Batch(
            rows,
            device=device,
            dtype=self.dtype,
            kv_heads=self.heads[0],
            group=self.heads[1],
            key_size=self.sizes[0],
            value_size=self.sizes[1],
            block_size=self.block_size,
            shared_blocks=shared_blocks if self.window is None else 0,
            heads_first=heads_first,
            window=self.window,
        )
        num_heads = self.heads[0] * self.heads[1]
        batch.compare(
            softcap=self.softcap,
            sinks=torch.linspace(-1, 2, num_heads, device=device) if self.with_sinks else None,
            alibi=alibi_slopes(num_heads, device) if self.with_alibi else None,
            causal=self.causal,
        )


shapes = st.builds(
    Shape,
    heads=st.sampled_from([(1, 1), (2, 1), (2, 4), (1, 7), (3, 3), (1, 20)]),
    sizes=st.sampled_from([(64, 64), (64, 32), (80, 80), (128, 128), (40, 96)]),
    block_size=st.sampled_from([16, 32, 128]),
    window=st.sampled_from([None, None, 1, 7, 64, 100]),
    softcap=st.sampled_from([None, None, 1.5]),
    with_sinks=st.booleans(),
    with_alibi=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    causal=st.booleans(),
)
# Each takes a GPU seconds to compile for, so there a few stand for all.
COMPILED_SHAPES = [
    Shape((2, 4), (128, 128), 16, None, None, False, False, torch.bfloat16),
    Shape((2, 4), (128, 128), 16, None, None, False, False, torch.float32),
    Shape((2, 1), (64, 64), 32, 64, None, False, False, torch.bfloat16),
    Shape((1, 7), (80, 80), 16, None, 1.5, True, False, torch.float16),
    Shape((1, 20), (64, 32), 128, 7, None, True, False, torch.bfloat16),
    Shape((3, 3), (40, 96), 16, None, None, False, True, torch.float16),
    Shape((2, 4), (128, 128), 32, 100, 1.5, True, True, torch.bfloat16),
    Shape((1, 1), (80, 80), 16, 1, 1.5, True, True, torch.float32),
    Shape((6, 1), (64, 64), 16, None, None, False, False, torch.bfloat16, causal=False),
    Shape((2, 1), (64, 64), 16, 65, None, False, False, torch.bfloat16, causal=False),
]
rows_of_a_batch = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 15, 16, 17, 63, 64, 130, 300]),
        st.sampled_from([0, 1, 1, 1, 2, 5, 16, 17, 40]),
    ),
    min_size=1,
    max_size=5,
).filter(lambda rows: any(queries for _, queries in rows))


@settings(
    max_examples=examples(20, all_of_them=150),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=rows_of_a_batch,
    shape=shapes,
    shared_blocks=st.sampled_from([0, 2]),
    heads_first=st.booleans(),
)
def test_any_batch(
    interpreted: torch.device,
    *,
    rows: list[Row],
    shape: Shape,
    shared_blocks: int,
    heads_first: bool,
) -> None:
    shape.compare(interpreted, rows, shared_blocks=shared_blocks, heads_first=heads_first)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", COMPILED_SHAPES)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows_of_a_batch, shared_blocks=st.sampled_from([0, 2]), heads_first=st.booleans())
def test_any_rows(
    gpu: torch.device, *, shape: Shape, rows: list[Row], shared_blocks: int, heads_first: bool
) -> None:
    shape.compare(gpu, rows, shared_blocks=shared_blocks, heads_first=heads_first)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_head_sizes(device: torch.device, head_size: int) -> None:
    for dtype in dtypes_of(device):
        Batch([(33, 1), (20, 30)], device=device, dtype=dtype, key_size=head_size).compare()


@pytest.mark.parametrize("window", [None, 1, 40, 200])
def test_rows_that_see_what_is_behind_them(device: torch.device, window: int | None) -> None:
    for dtype in dtypes_of(device):
        rows = [(0, 1), (0, 7), (0, 33), (0, 150), (0, 64)]
        Batch(rows, device=device, dtype=dtype, group=1, window=window).compare(causal=False)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 257, 3000])
def test_decode_of_any_length(device: torch.device, length: int) -> None:
    for dtype in dtypes_of(device):
        Batch([(length - 1, 1)], device=device, dtype=dtype, kv_heads=1).compare()


def test_rows_of_unlike_lengths_in_one_decode(device: torch.device) -> None:
    # 64 keys in float32 and 256 in float16 just fit one split: nothing is left to merge.
    rows = [(0, 1), (2500, 1), (63, 1), (255, 1), (700, 1), (0, 0)]
    for dtype in dtypes_of(device):
        Batch(rows, device=device, dtype=dtype, kv_heads=1).compare()
    Batch(rows, device=device, dtype=torch.float16, window=200).compare(softcap=5.0)


@pytest.mark.parametrize("queries", [2, 3, 8, 31])
def test_a_few_queries_a_row_are_split_too(device: torch.device, queries: int) -> None:
    rows = [(1000, queries), (3, queries), (0, queries)]
    sinks = torch.tensor([0.5, 3.0], device=device)
    batch = Batch(rows, device=device, dtype=torch.float16, kv_heads=1)
    batch.compare(sinks=sinks, alibi=alibi_slopes(2, device))
    Batch(rows, device=device, dtype=torch.float16, kv_heads=1, window=3).compare(sinks=sinks)


def test_a_long_chunk_over_a_long_prefix(device: torch.device) -> None:
    rows = [(2000, 150), (0, 300), (37, 1)]
    Batch(rows, device=device, dtype=torch.float16, group=4).compare()
    Batch(rows, device=device, dtype=torch.float16, group=4, window=70).compare()


def test_the_last_query_of_a_tile_does_not_see_the_first_key_of_its_window(
    device: torch.device,
) -> None:
    # One more query than fills tiles of keys: the masked part at the window's edge is one longer.
    for dtype in dtypes_of(device):
        Batch([(300, 66)], device=device, dtype=dtype, group=1, window=200).compare()


def test_bounds_may_be_loose(device: torch.device) -> None:
    # A captured launch keeps the bounds of the longest context and of all rows it can hold.
    batch = Batch([(40, 1), (300, 1), (0, 0), (0, 0)], device=device, dtype=torch.float32)
    batch.bounds = {"max_query_len": 1, "max_seq_len": 100_000}
    batch.compare()
    batch.bounds = {"max_query_len": 500, "max_seq_len": 100_000}
    batch.compare()


def test_bounds_are_read_from_the_device_where_none_are_given(device: torch.device) -> None:
    batch = Batch([(40, 1), (30, 100)], device=device, dtype=torch.float32)
    batch.bounds = {}
    batch.compare()


def test_a_batch_without_queries_writes_nothing(device: torch.device) -> None:
    batch = Batch([(0, 1)], device=device, dtype=torch.float32)
    batch.query_start.zero_()
    batch.num_tokens = 0
    batch.compare()


def test_what_the_kernels_do_not_take_is_named(device: torch.device) -> None:
    batch = Batch([(5, 1)], device=device, dtype=torch.float32, block_size=8)
    with pytest.raises(ValueError, match="block size is 8"):
        batch.compare()
    batch = Batch([(5, 1)], device=device, dtype=torch.float32)
    with pytest.raises(ValueError, match="scale is -1"):
        batch.compare(scale=-1.0)
    batch.query = batch.query.half()
    with pytest.raises(ValueError, match="must be the same"):
        batch.compare()
    batch = Batch([(5, 1)], device=device, dtype=torch.float32, kv_heads=2, group=2)
    batch.query = batch.query[:, :3]
    with pytest.raises(ValueError, match="3 query heads"):
        batch.compare()


@pytest.mark.gpu
def test_a_pool_of_more_than_2_to_the_31_elements(gpu: torch.device) -> None:
    block_elements = 16 * 8 * 256
    num_blocks = 2**31 // block_elements + 8
    pool = torch.empty(num_blocks, 16, 8, 256, dtype=torch.bfloat16, device=gpu)
    last = num_blocks - 1
    pool[last].normal_()
    query = torch.randn(2, 32, 128, dtype=torch.bfloat16, device=gpu)
    arguments: dict[str, Any] = {
        "query_start": torch.tensor([0, 2], dtype=torch.int32, device=gpu),
        "seq_lens": torch.tensor([16], dtype=torch.int32, device=gpu),
        "scale": 0.1,
    }
    table = torch.tensor([[last]], dtype=torch.int32, device=gpu)
    result = paged_attention(
        query, pool[..., :128], pool[..., 128:], block_tables=table, **arguments
    )
    small = pool[last:].double()
    expected = reference.paged_attention(
        query.double(), small[..., :128], small[..., 128:], block_tables=table * 0, **arguments
    )
    torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2)


def test_plain_prefill_is_cut_its_own_way_only_where_the_table_says_so() -> None:
    plain, other = (
        [
            config_for(kernel, head_size=size, itemsize=2, capability=capability)
            for size, capability in [(96, 9), (128, 10), (128, 8), (64, 9), (256, 9)]
        ]
        for kernel in ("prefill_plain", "prefill")
    )
    assert [plain_config == config for plain_config, config in zip(plain, other, strict=True)] == [
        *(False, False, True, False, True)
    ]


@pytest.mark.parametrize("slots", [16, 264])
def test_splits_fill_the_device_and_no_more(slots: int) -> None:
    assert num_splits(1, 1, slots) == 1
    assert num_splits(10 * slots, 4096, slots) <= 2
    assert num_splits(8, 4096, slots) >= min(slots // 8, MAX_SPLITS) // 2
    assert num_splits(1, 8, slots) <= 4

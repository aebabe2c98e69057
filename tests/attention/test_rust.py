"""Paged attention in Rust against the reference kernel, over pools poisoned with NaN."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedserve import _core
from pagedserve.errors import StepError
from pagedserve.kernels.reference import paged_attention, write_cache

Row = tuple[int, int]  # cached keys, queries

# Both round the answer; ours rounds the weights as well.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    rows: list[Row]
    dtype: torch.dtype = torch.float32
    group: int = 2
    kv_heads: int = 2
    key_size: int = 16
    value_size: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    causal: bool = True
    num_threads: int = 1
    instructions: Any = None


class Pools:
    """The same keys and values in a pool for the reference and in one of the Rust layout."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1)
        self.case = case
        lengths = [cached + queries for cached, queries in case.rows]
        counts = [-(-length // case.block_size) for length in lengths]
        ids = np.random.default_rng(1).permutation(sum(counts) + 2).astype(np.int32)
        self.tables = np.full((len(counts), max(counts)), ids[-1], dtype=np.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = ids[sum(counts[:row]) :][:count]
        self.num_blocks = len(ids)
        heads, size = case.kv_heads, case.key_size + case.value_size
        self.reference = torch.full(
            (self.num_blocks, case.block_size, heads, size), torch.nan, dtype=case.dtype
        )
        self.packed = self.reference.clone()
        self.sinks = torch.randn(case.group * heads) if case.has_sinks else None
        self.alibi = torch.rand(case.group * heads) if case.has_alibi else None

    def random(self, heads: int, num_tokens: int, size: int) -> Tensor:
        """[T, heads, size] as transformers has it: a view of [1, heads, T, size]."""
        numbers = torch.randn(1, heads, num_tokens, size, dtype=self.case.dtype)
        return numbers[0].transpose(0, 1)

    def step(self, rows: list[Row], **changes: Any) -> tuple[Tensor, Tensor]:
        """Both answers to a step."""
        case = self.case
        num_tokens = sum(queries for _, queries in rows)
        positions = [range(cached, cached + queries) for cached, queries in rows]
        slots = np.array(
            [
                self.tables[row, position // case.block_size] * case.block_size
                + position % case.block_size
                for row, places in enumerate(positions)
                for position in places
            ],
            dtype=np.int64,
        )
        query_start = np.cumsum([0, *(queries for _, queries in rows)]).astype(np.int32)
        seq_lens = np.array([sum(row) for row in rows], dtype=np.int32)
        query = self.random(case.group * case.kv_heads, num_tokens, case.key_size)
        key = self.random(case.kv_heads, num_tokens, case.key_size)
        value = self.random(case.kv_heads, num_tokens, case.value_size)
        key_cache = self.reference[..., : case.key_size]
        value_cache = self.reference[..., case.key_size :]
        write_cache(key, value, key_cache, value_cache, torch.from_numpy(slots))
        expected = paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables=torch.from_numpy(self.tables),
            query_start=torch.from_numpy(query_start),
            seq_lens=torch.from_numpy(seq_lens),
            scale=0.3,
            window=case.window,
            softcap=case.softcap,
            sinks=self.sinks,
            alibi=self.alibi,
            causal=case.causal,
        )
        output = torch.full_like(expected, torch.nan)
        arguments: dict[str, Any] = {
            "dtype": str(case.dtype).removeprefix("torch."),
            "query": query.data_ptr(),
            "query_strides": query.stride()[:2],
            "key": key.data_ptr(),
            "key_strides": key.stride()[:2],
            "value": value.data_ptr(),
            "value_strides": value.stride()[:2],
            "pool": self.packed.data_ptr(),
            "output": output.data_ptr(),
            "num_heads": query.shape[1],
            "num_kv_heads": case.kv_heads,
            "key_size": case.key_size,
            "value_size": case.value_size,
            "num_blocks": self.num_blocks,
            "block_size": case.block_size,
            "block_tables": self.tables.reshape(-1),
            "query_start": query_start,
            "seq_lens": seq_lens,
            "slot_mapping": slots,
            "scale": 0.3,
            "window": case.window,
            "softcap": case.softcap,
            "sinks": None if self.sinks is None else self.sinks.numpy(),
            "alibi": None if self.alibi is None else self.alibi.numpy(),
            "causal": case.causal,
            "num_threads": case.num_threads,
            "instructions": case.instructions,
        }
        _core.cpu.paged_attention(**(arguments | changes))
        return output, expected


def compare(case: Case) -> None:
    pools = Pools(case)
    # What a score is rounded by is an error of its weight, in both; a key ahead of its query has a
    # score of up to their distance.
    is_ahead = case.has_alibi and not case.causal
    largest = max(map(sum, case.rows)) if is_ahead else 0
    tolerance = max(TOLERANCE[case.dtype], 2 * torch.finfo(torch.float32).eps * largest)
    for rows in ([(0, cached) for cached, _ in case.rows], case.rows):
        output, expected = pools.step(rows)
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    row = st.tuples(st.integers(0, 200), st.integers(1, 40) | st.just(1))
    key_size, value_size = draw(st.sampled_from([(16, 16), (64, 64), (80, 32), (24, 16), (5, 3)]))
    return Case(
        rows=draw(st.lists(row, min_size=1, max_size=4)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        group=draw(st.integers(1, 4)),
        kv_heads=draw(st.integers(1, 3)),
        key_size=key_size,
        value_size=value_size,
        block_size=draw(st.sampled_from([16, 32, 4, 7])),
        window=draw(st.none() | st.integers(1, 100)),
        softcap=draw(st.none() | st.just(2.0)),
        has_sinks=draw(st.booleans()),
        has_alibi=draw(st.booleans()),
        causal=draw(st.booleans()),
        num_threads=draw(st.integers(1, 3)),
        instructions=draw(st.none() | st.sampled_from(_core.cpu.instruction_sets())),
    )


@settings(max_examples=60)
@given(case=cases())
@example(Case([(170, 1)], group=1, kv_heads=1, has_alibi=True, causal=False))
def test_answers_equal_the_reference(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_long_rows_whose_keys_are_split_over_threads(dtype: torch.dtype) -> None:
    compare(Case([(1500, 1)], dtype=dtype, key_size=64, value_size=64, num_threads=2))


def test_a_token_without_a_slot_is_not_written() -> None:
    pools = Pools(Case([(0, 3)]))
    before = pools.packed.clone()
    pools.step([(0, 3)], slot_mapping=np.full(3, -1, dtype=np.int64))
    torch.testing.assert_close(pools.packed, before, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float64"}, "dtype is"),
        ({"instructions": "mmx"}, "instructions is"),
        ({"num_heads": -1}, "num_heads is -1"),
        ({"num_heads": 3}, "multiple of num_kv_heads"),
        ({"key_strides": (-1, 1)}, "key_strides"),
        ({"key_strides": (2**60, 1)}, "strides of key"),
        ({"pool": 0}, "pool must be the address"),
        ({"query": 3}, "query must be the address"),
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"scale": float("nan")}, "scale"),
        ({"sinks": np.zeros(3, dtype=np.float32)}, "sinks"),
        ({"sinks": np.zeros(4)}, "sinks must be a one-dimensional contiguous float32"),
        ({"alibi": np.zeros(5, dtype=np.float32)}, "alibi must hold one slope"),
        ({"position_bias": np.zeros(5, dtype=np.float32)}, "position_bias must hold as many"),
        ({"position_bias": np.full(4, np.nan, np.float32)}, "position_bias must hold finite"),
        ({"position_bias": np.zeros(4, np.float32), "causal": False}, "causal must be true"),
        ({"alibi": np.full(4, np.nan, dtype=np.float32)}, "alibi must hold finite slopes"),
        ({"query_start": np.array([0, 1], dtype=np.int32)}, "query_start must have"),
        ({"query_start": np.array([0, 3, 2], dtype=np.int32)}, "query_start must"),
        ({"seq_lens": np.array([20, 1], dtype=np.int32)}, "row 1 has 2 queries"),
        ({"seq_lens": np.array([99, 2], dtype=np.int32)}, "row 0 of block_tables"),
        ({"slot_mapping": np.array([0, 1, 99999], dtype=np.int64)}, "slot_mapping[2]"),
        ({"slot_mapping": np.array([0, 1, -2], dtype=np.int64)}, "slot_mapping[2]"),
        ({"block_tables": np.array([0, 9, 1, 1], dtype=np.int32)}, "block_tables[0, 1]"),
        ({"block_tables": np.array([0, 1, 2], dtype=np.int32)}, "block_tables must hold"),
        ({"block_tables": [0, 1]}, "block_tables must be"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    pools = Pools(Case([(19, 1), (0, 2)]))
    with pytest.raises(StepError) as caught:
        pools.step(pools.case.rows, **changes)
    assert message in str(caught.value)

"""Bucketed attention against the reference kernel, over pools poisoned with NaN."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.attention.buckets import (
    FreshBucket,
    PagedBucket,
    PlanOptions,
    plan_buckets,
)
from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions
from pagedserve.attention.torch import BACKEND, attend, step_buckets
from pagedserve.kernels.reference import write_cache
from tests.support.attention_steps import KEY_SIZE, Row, Step

PLAIN = PlanOptions(
    window=None, causal=True, allow_fresh=True, dtype=torch.float32, device=torch.device("cpu")
)

rows_of_a_step = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=12
)


@settings(max_examples=60)
@given(
    rows=rows_of_a_step,
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 5, 1000]),
    causal=st.booleans(),
)
def test_any_mix_of_rows(
    rows: list[Row], block_size: int, window: int | None, *, causal: bool
) -> None:
    options = AttentionOptions(scale=0.3, window=window, causal=causal)
    Step(rows, block_size=block_size).compare(BACKEND, options)


@settings(max_examples=20)
@given(rows=rows_of_a_step, window=st.sampled_from([None, 6]))
def test_softcap_and_sinks(rows: list[Row], window: int | None) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    Step(rows).compare(
        BACKEND, AttentionOptions(scale=0.3, window=window, softcap=1.5, sinks=sinks)
    )
    Step(rows).compare(BACKEND, AttentionOptions(scale=0.3, window=window, sinks=sinks))


@settings(max_examples=20)
@given(rows=rows_of_a_step, window=st.sampled_from([None, 6]), is_capped=st.booleans())
def test_alibi(rows: list[Row], window: int | None, is_capped: bool) -> None:
    slopes, sinks = torch.tensor([0.5, 0.1, 0.02, 1.0]), torch.tensor([0.5, -1.0, 2.0, 0.0])
    options = AttentionOptions(scale=0.3, window=window, alibi=slopes)
    Step(rows).compare(BACKEND, options)
    if is_capped:
        Step(rows).compare(BACKEND, replace(options, softcap=1.5, sinks=sinks))


def test_values_of_another_size() -> None:
    Step([(9, 1), (0, 12), (5, 4)], value_size=3).compare(BACKEND, AttentionOptions(scale=0.3))


def test_long_chunk_over_a_cached_prefix_is_cut_into_runs() -> None:
    Step([(100, 600), (0, 300), (37, 1)], block_size=16).compare(
        BACKEND, AttentionOptions(scale=0.2)
    )
    Step([(100, 600)], block_size=16).compare(BACKEND, AttentionOptions(scale=0.2, window=70))
    options = AttentionOptions(scale=0.2, window=70, causal=False)
    Step([(0, 600), (0, 90)], block_size=16).compare(BACKEND, options)
    Step([(0, 600), (0, 90)], block_size=16).compare(BACKEND, replace(options, window=None))


def test_the_plan_covers_every_query_once() -> None:
    rows = [(0, 9), (0, 10), (3, 300), *[(length, 1) for length in range(1, 200, 7)]]
    step = Step(rows)
    seen: list[int] = []
    for bucket in plan_buckets(step.layout, PLAIN):
        written = bucket.written
        if isinstance(written, slice):
            seen += range(written.start, written.stop)
        else:
            seen += written.tolist()
    assert sorted(seen) == list(range(int(step.query_start[-1])))


def test_decode_rows_of_similar_length_share_a_call_and_padding_stays_small() -> None:
    rows = [(length, 1) for length in np.random.default_rng(0).integers(50, 600, 64).tolist()]
    buckets = plan_buckets(Step(rows, block_size=16).layout, PLAIN)
    gathered = sum(len(bucket.slots) for bucket in buckets if isinstance(bucket, PagedBucket))
    assert len(buckets) <= 16
    assert gathered <= 1.25 * sum(cached + 1 for cached, _ in rows)


def test_whole_prompts_do_not_gather() -> None:
    buckets = plan_buckets(Step([(0, 50), (0, 20), (0, 21)]).layout, PLAIN)
    assert all(isinstance(bucket, FreshBucket) for bucket in buckets)


def test_plans_are_made_once_and_shared_by_windows_that_hide_nothing() -> None:
    step = Step([(30, 1), (0, 12)])
    metadata = AttentionMetadata(step.layout, step.slot_mapping)

    def plan(window: int | None) -> object:
        options = AttentionOptions(scale=0.3, window=window)
        return step_buckets(metadata, options, torch.float32)

    assert plan(None) is plan(31)
    assert plan(None) is not plan(8)
    assert plan(8) is plan(8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    step = Step([(20, 1), (0, 16), (3, 5)])
    exact = Step([(20, 1), (0, 16), (3, 5)])
    for part in ("query", "key", "value", "pool"):
        setattr(step, part, getattr(step, part).to(dtype))
    outputs = []
    for each in (step, exact):
        write_cache(
            each.key[0].transpose(0, 1),
            each.value[0].transpose(0, 1),
            each.pool[..., :KEY_SIZE],
            each.pool[..., KEY_SIZE:],
            each.slot_mapping,
        )
        metadata = AttentionMetadata(each.layout, each.slot_mapping)
        options = AttentionOptions(scale=0.3)
        outputs.append(
            attend(each.query, each.key, each.value, each.pool, metadata=metadata, options=options)
        )
    assert outputs[0].dtype == dtype
    torch.testing.assert_close(outputs[0].float(), outputs[1], rtol=0.05, atol=0.05)

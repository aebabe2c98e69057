"""Attention by torch's function against the reference kernel, over pools poisoned with NaN."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions, BatchLayout
from pagedserve.attention.sdpa import BACKEND
from pagedserve.errors import UnsupportedModelError
from tests.support.attention_steps import HEADS, Row, Step

PLAIN = AttentionOptions(scale=0.3)


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=12),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 5, 1000]),
    causal=st.booleans(),
)
def test_any_mix_of_rows(
    rows: list[Row], block_size: int, window: int | None, *, causal: bool
) -> None:
    options = AttentionOptions(scale=0.3, window=window, causal=causal)
    Step(rows, block_size=block_size).compare(BACKEND, options)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("causal", [True, False])
def test_long_rows_are_cut_where_they_need_a_mask(window: int | None, *, causal: bool) -> None:
    options = AttentionOptions(scale=0.2, window=window, causal=causal)
    Step([(100, 600), (0, 600), (0, 90), (37, 1)], block_size=16).compare(BACKEND, options)


def test_values_of_another_size() -> None:
    Step([(9, 1), (0, 12), (5, 4)], value_size=3).compare(BACKEND, PLAIN)


def test_rows_of_equal_lengths_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def note(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        calls.append((len(query), options["attn_mask"] is not None))
        return attend(query, key, value, **options)

    monkeypatch.setattr("pagedserve.attention.sdpa.functional.scaled_dot_product_attention", note)
    step = Step([(30, 1), (0, 12), (30, 1), (7, 5), (0, 12), (31, 1)])
    step.compare(BACKEND, PLAIN)
    assert calls == [(2, False), (2, False), (1, True), (1, False)]


def answer(step: Step, rows: slice, tokens: slice) -> Tensor:
    """What some of the rows of a step get without the others."""
    layout = step.layout
    metadata = AttentionMetadata(
        BatchLayout(
            query_start=layout.query_start[rows.start : rows.stop + 1] - tokens.start,
            seq_lens=layout.seq_lens[rows],
            block_tables=layout.block_tables[rows],
            block_size=layout.block_size,
        ),
        step.slot_mapping[tokens],
    )
    query, key, value = (part[:, :, tokens] for part in (step.query, step.key, step.value))
    return BACKEND.write_and_attend(query, key, value, step.pool, metadata=metadata, options=PLAIN)


def test_a_row_gets_to_the_last_bit_what_it_gets_alone() -> None:
    step = Step([(30, 1), (0, 12), (7, 5), (33, 1)])
    together = answer(step, slice(0, 4), slice(0, 19))
    for row, (start, end) in enumerate([(0, 1), (1, 13), (13, 18), (18, 19)]):
        alone = answer(step, slice(row, row + 1), slice(start, end))
        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    rows = [(20, 1), (0, 16), (3, 5)]
    step, exact = Step(rows), Step(rows)
    for part in ("query", "key", "value", "pool"):
        setattr(step, part, getattr(step, part).to(dtype))
    whole = slice(0, len(rows)), slice(0, sum(queries for _, queries in rows))
    found, expected = answer(step, *whole), answer(exact, *whole)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", 2.0),
        ("sinks", torch.zeros(HEADS)),
        ("alibi", torch.ones(HEADS)),
        ("position_bias", torch.ones(HEADS, 9)),
    ],
)
def test_what_torch_does_not_compute_is_refused_by_name(name: str, value: Any) -> None:
    options = AttentionOptions(scale=0.3, **{name: value})
    with pytest.raises(UnsupportedModelError, match=f"attention has {name}, which torch's"):
        Step([(3, 1)]).compare(BACKEND, options)

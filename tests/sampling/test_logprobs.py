"""Reported log-probabilities and candidates against float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedserve.sampling.on_host import HostOps
from pagedserve.sampling.rows import LogitsEdits, RowSampling
from pagedserve.sampling.sampler import Sampler, top_logprobs


def naive_logprobs(logits: list[float]) -> list[float]:
    peak = max(logits)
    total = peak + math.log(math.fsum(math.exp(value - peak) for value in logits))
    return [value - total for value in logits]


def naive_order(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def naive_rank(logits: list[float], token: int) -> int:
    return 1 + sum(value > logits[token] for value in logits)


# Multiples of 1/2 so that ties are common, at the last place too.
vocab_sizes = st.integers(1, 30)
values = st.integers(-9, 9).map(lambda n: n / 2) | st.just(-math.inf)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    size = draw(vocab_sizes)
    row = st.lists(values, min_size=size, max_size=size).filter(lambda row: max(row) > -math.inf)
    rows = draw(st.lists(row, min_size=1, max_size=9))
    return rows, [draw(st.integers(0, size - 1)) for _ in rows]


@settings(max_examples=100)
@given(batch=batches(), num_top=st.integers(0, 8))
def test_top_logprobs_equal_the_naive_ones(
    batch: tuple[list[list[float]], list[int]], num_top: int
) -> None:
    rows, targets = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostOps, "max_elements", 4 * len(rows[0]))
        found = top_logprobs(np.array(rows, np.float32), np.array(targets), num_top)
    target_logprobs, ranks, top_ids, top = (array.tolist() for array in found)
    for index, (row, target) in enumerate(zip(rows, targets, strict=True)):
        expected, order = naive_logprobs(row), naive_order(row)[:num_top]
        assert target_logprobs[index] == pytest.approx(expected[target], abs=1e-5)
        assert ranks[index] == naive_rank(row, target)
        assert top_ids[index] == order
        assert top[index] == pytest.approx([expected[token] for token in order], abs=1e-5)


def test_top_logprobs_of_a_real_vocabulary_are_those_of_float64() -> None:
    logits = torch.randn(100, 49_152, generator=torch.Generator().manual_seed(1)) * 3
    targets = torch.arange(100) * 491
    arrays = top_logprobs(logits.numpy(), targets.numpy(), 5)
    target_logprobs, ranks, top_ids, top = map(torch.from_numpy, arrays)
    expected = logits.double().log_softmax(dim=-1)
    assert torch.allclose(top.double(), expected.topk(5).values, atol=1e-5)
    assert torch.equal(top_ids.long(), expected.topk(5).indices)
    of_targets = expected.gather(1, targets[:, None])
    assert torch.allclose(target_logprobs.double(), of_targets[:, 0], atol=1e-5)
    assert torch.equal(ranks.long(), 1 + (expected > of_targets).sum(dim=-1))


def test_no_rows_have_no_logprobs() -> None:
    found = top_logprobs(np.zeros((0, 7), np.float32), np.zeros(0, np.int64), 3)
    assert [tuple(array.shape) for array in found] == [(0,), (0,), (0, 3), (0, 3)]


def random_logits(num_rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(7).normal(size=(num_rows, 40), scale=2).astype(np.float32)


def test_logprobs_are_the_models_whatever_the_row_does_to_its_logits() -> None:
    logits = random_logits(5)
    edits = LogitsEdits(logit_bias=((3, 50.0),), banned_token_ids=(int(logits[1].argmax()),))
    rows = [
        RowSampling(temperature=0.0, num_logprobs=2),
        RowSampling(temperature=3.0, edits=edits, uniforms=(0.1, 0.5, 0.9), num_logprobs=4),
        RowSampling(uniforms=(0.3,)),
        RowSampling(top_k=2, uniforms=(0.99,), num_logprobs=0),
        RowSampling(num_candidates=3, num_logprobs=4),
    ]
    sampled = Sampler().sample(logits, rows)
    found = sampled.logprobs
    assert found is not None
    row_of_draw = [0, 1, 1, 1, 2, 3]
    for draw, (index, token) in enumerate(zip(row_of_draw, sampled.tokens.tolist(), strict=True)):
        row = logits[index].tolist()
        if rows[index].num_logprobs is None:
            assert math.isnan(found.token_logprobs[draw])
            assert found.token_ranks[draw] == 0
            continue
        assert found.token_logprobs[draw] == pytest.approx(naive_logprobs(row)[token], abs=1e-5)
        assert found.token_ranks[draw] == naive_rank(row, token)
        order = naive_order(row)[:4]
        assert found.top_token_ids[index].tolist() == order
        expected = [naive_logprobs(row)[token] for token in order]
        assert found.top_logprobs[index] == pytest.approx(expected, abs=1e-5)
    for index in (2, 4):
        assert found.top_token_ids[index].tolist() == [0] * 4
        assert np.isnan(found.top_logprobs[index]).all()


def test_logprobs_of_the_drawn_token_alone_have_no_columns() -> None:
    rows = [RowSampling(temperature=0.0, num_logprobs=0), RowSampling()]
    found = Sampler().sample(random_logits(2), rows).logprobs
    assert found is not None
    assert found.top_logprobs.shape == found.top_token_ids.shape == (2, 0)
    assert np.isfinite(found.token_logprobs).tolist() == [True, False]


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    found = Sampler().sample(random_logits(1), [RowSampling(num_logprobs=99)]).logprobs
    assert found is not None
    assert sorted(found.top_token_ids[0].tolist()) == list(range(40))


def test_candidates_are_the_likeliest_of_the_edited_logits() -> None:
    logits = random_logits(4)
    edits = LogitsEdits(logit_bias=((3, 1.5),), allowed_token_ids=(3, 5, 8))
    rows = [
        RowSampling(num_candidates=4, temperature=0.5, top_k=1),
        RowSampling(temperature=0.0, num_logprobs=1),
        RowSampling(num_candidates=6, edits=edits),
        RowSampling(num_candidates=2),
    ]
    sampled = Sampler().sample(logits, rows)
    found = sampled.candidates
    assert found is not None
    assert sampled.draw_start.tolist() == [0, 0, 1, 1, 1]
    edited = logits.tolist()
    edited[2] = [
        value if token in (3, 5, 8) else -math.inf for token, value in enumerate(edited[2])
    ]
    edited[2][3] += 1.5
    for index in (0, 2, 3):
        order = naive_order(edited[index])[:6]
        expected = [naive_logprobs(edited[index])[token] for token in order]
        assert found.token_ids[index].tolist() == order
        assert found.logprobs[index] == pytest.approx(expected, abs=1e-5)
    assert found.token_ids[1].tolist() == [0] * 6
    assert np.isnan(found.logprobs[1]).all()


def test_a_row_that_fails_spares_its_neighbours_logprobs_and_candidates() -> None:
    logits = random_logits(3)
    logits[1, 4] = math.nan
    rows = [RowSampling(num_logprobs=2), RowSampling(num_logprobs=2), RowSampling(num_candidates=2)]
    sampled = Sampler().sample(logits, rows)
    assert list(sampled.errors) == [1]
    assert sampled.logprobs is not None
    assert sampled.candidates is not None
    assert np.isfinite(sampled.logprobs.top_logprobs[0]).all()
    assert np.isfinite(sampled.candidates.logprobs[2]).all()


def test_labels_get_their_log_probabilities_whatever_is_sampled() -> None:
    logits = random_logits(4)
    rows = [
        RowSampling(temperature=0.0, label_token_ids=(5, 3, 39)),
        RowSampling(temperature=0.0),
        RowSampling(temperature=0.0, label_token_ids=(7,)),
        RowSampling(temperature=0.0, label_token_ids=(1, 2)),
    ]
    logits[3, 4] = np.nan
    sampled = Sampler().sample(logits, rows)
    assert sampled.labels.keys() == {0, 2}
    assert sampled.errors.keys() == {3}
    for row, found in sampled.labels.items():
        exact = logits[row].astype(np.float64)
        expected = exact - np.log(np.exp(exact).sum())
        np.testing.assert_allclose(found, expected[[*rows[row].label_token_ids]], atol=1e-5)

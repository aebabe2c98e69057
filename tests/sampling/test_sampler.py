"""The sampler against slow, obvious implementations."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.sampling.batch import RowSampling
from pagedserve.sampling.sampler import Sampler


def naive_distribution(logits: list[float], row: RowSampling) -> list[float]:
    """Probabilities after temperature, top_k, top_p, min_p; ties with the last are kept."""
    scaled = [logit / row.temperature for logit in logits]
    peak = max(scaled)
    weights = [math.exp(value - peak) for value in scaled]
    ordered = sorted(scaled, reverse=True)
    kept = set(range(len(scaled)))
    if row.top_k > 0:
        kth = ordered[min(row.top_k, len(ordered)) - 1]
        kept = {token for token in kept if scaled[token] >= kth}
    if row.top_p < 1:
        total, mass, last = sum(weights[token] for token in kept), 0.0, ordered[-1]
        for token in sorted(kept, key=lambda token: -scaled[token]):
            mass += weights[token]
            last = scaled[token]
            if mass / total >= row.top_p:
                break
        kept = {token for token in kept if scaled[token] >= last}
    kept = {token for token in kept if weights[token] >= row.min_p}
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def naive_token(logits: list[float], row: RowSampling) -> int:
    mass = 0.0
    probabilities = naive_distribution(logits, row)
    for token, probability in enumerate(probabilities):
        mass += probability
        if row.uniform < mass:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability > 0)


def sample(logits: Any, rows: list[RowSampling]) -> list[int]:
    tokens: list[int] = Sampler().sample(torch.as_tensor(logits), rows).tolist()
    return tokens


# Multiples of 1/4 so that ties are common and sums are not at the edge of rounding.
logits_of_a_row = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=40)
samplings = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 2, 3, 10, 1000]),
    top_p=st.sampled_from([1e-9, 0.113, 0.5117, 0.913, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.317, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)


@settings(max_examples=300, deadline=None)
@given(logits=logits_of_a_row, row=samplings)
def test_the_support_equals_the_naive_one(logits: list[float], row: RowSampling) -> None:
    expected = naive_distribution(logits, row)
    rows = [replace(row, uniform=u) for u in np.linspace(0, 1, 200, endpoint=False).tolist()]
    got = set(sample([logits] * len(rows), rows))
    assert got <= {token for token, probability in enumerate(expected) if probability > 0}
    assert got >= {token for token, probability in enumerate(expected) if probability > 0.0051}


@settings(max_examples=300, deadline=None)
@given(logits=logits_of_a_row, row=samplings)
def test_a_draw_equals_the_naive_one(logits: list[float], row: RowSampling) -> None:
    token = sample([logits], [row])[0]
    edges = np.cumsum(naive_distribution(logits, row))
    if np.abs(edges - row.uniform).min() > 1e-9:
        assert token == naive_token(logits, row)


@pytest.mark.parametrize(
    "row",
    [
        RowSampling(temperature=0.8),
        RowSampling(temperature=1.3, top_k=7),
        RowSampling(top_p=0.7),
        RowSampling(min_p=0.2),
        RowSampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05),
    ],
)
def test_frequencies_pass_a_chi_squared_test(row: RowSampling) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(3)) * 1.5
    num_draws = 20_000
    uniforms = np.random.default_rng(5).random(num_draws).tolist()
    rows = [replace(row, uniform=uniform) for uniform in uniforms]
    counts = np.bincount(sample(logits.expand(num_draws, -1), rows), minlength=30)
    expected = np.array(naive_distribution(logits.double().tolist(), row)) * num_draws
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = int(likely.sum()) - 1
    # Wilson and Hilferty's approximation of the 99.9 % quantile.
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < quantile


def test_temperature_0_and_top_k_1_are_the_same_and_take_the_first_of_equals() -> None:
    logits = torch.randn(64, 50).mul(2).round()
    cold = sample(logits, [RowSampling(temperature=0.0, uniform=0.9)] * 64)
    single = sample(logits, [RowSampling(temperature=5.0, top_k=1, uniform=0.9)] * 64)
    first = [row.index(max(row)) for row in logits.tolist()]
    assert cold == single == first


def test_rows_are_independent_of_their_batch() -> None:
    generator = np.random.default_rng(2)
    logits = torch.randn(48, 700, generator=torch.Generator().manual_seed(2)) * 2
    rows = [
        RowSampling(
            temperature=float(generator.choice([0.0, 0.5, 1.0, 3.0])),
            top_k=int(generator.choice([-1, 1, 5, 400])),
            top_p=float(generator.choice([0.2, 0.9, 0.999, 1.0])),
            min_p=float(generator.choice([0.0, 0.05])),
            uniform=float(generator.random()),
            banned_token_ids=tuple(generator.integers(0, 700, 3).tolist()) if index % 3 else (),
        )
        for index in range(48)
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_top_p_reaches_beyond_the_first_candidates() -> None:
    logits = [0.001 * token for token in range(5000)]
    row = RowSampling(top_p=0.93, uniform=0.0)
    assert sample([logits], [row])[0] == naive_token(logits, row)


def test_banned_tokens_never_come_and_the_logits_are_left_alone() -> None:
    logits = torch.tensor([[5.0, 1.0, 4.0]] * 3)
    rows = [
        RowSampling(temperature=0.0, banned_token_ids=(0,)),
        RowSampling(uniform=0.0, banned_token_ids=(0, 2)),
        RowSampling(temperature=0.0),
    ]
    assert sample(logits, rows) == [2, 1, 0]
    assert logits.tolist() == [[5.0, 1.0, 4.0]] * 3


def test_the_largest_uniform_takes_the_last_kept_token() -> None:
    uniform = math.nextafter(1.0, 0.0)
    logits = torch.zeros(1, 49_152)
    logits[0, 49_000:] = -1e9
    assert sample(logits, [RowSampling(uniform=uniform)]) == [48_999]


def test_tiny_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([[1000.0, 999.0, -1000.0]])
    assert sample(logits, [RowSampling(temperature=1e-6, uniform=0.99)]) == [0]

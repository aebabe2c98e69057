"""The sampler against slow, obvious implementations."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedserve.sampling.on_host import HostOps
from pagedserve.sampling.rows import LogitsEdits, RowSampling
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
        if row.uniforms[0] < mass:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability > 0)


def sample(logits: Any, rows: list[RowSampling]) -> list[int]:
    """The tokens of rows that all can be sampled."""
    sampled = Sampler().sample(np.asarray(logits, np.float32), rows)
    assert not sampled.errors
    tokens: list[int] = sampled.tokens.tolist()
    return tokens


# Multiples of 1/4 so that ties are common and sums are not at the edge of rounding.
logits_of_a_row = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=40)
samplings = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 2, 3, 10, 1000]),
    top_p=st.sampled_from([1e-9, 0.113, 0.5117, 0.913, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.317, 1.0]),
    uniforms=st.tuples(st.floats(0, 1, exclude_max=True)),
)


@settings(max_examples=300)
@given(logits=logits_of_a_row, row=samplings)
def test_the_support_equals_the_naive_one(logits: list[float], row: RowSampling) -> None:
    expected = naive_distribution(logits, row)
    uniforms = tuple(np.linspace(0, 1, 200, endpoint=False).tolist())
    got = set(sample([logits], [replace(row, uniforms=uniforms)]))
    if row.is_greedy:
        assert got == {logits.index(max(logits))}
        return
    assert got <= {token for token, probability in enumerate(expected) if probability > 0}
    assert got >= {token for token, probability in enumerate(expected) if probability > 0.0051}


@settings(max_examples=300)
@given(logits=logits_of_a_row, row=samplings)
def test_a_draw_equals_the_naive_one(logits: list[float], row: RowSampling) -> None:
    token = sample([logits], [row])[0]
    edges = np.cumsum(naive_distribution(logits, row))
    if np.abs(edges - row.uniforms[0]).min() > 1e-9:
        assert token == naive_token(logits, row)


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 1e-30, 0.01, 1.0]),
    top_k=st.sampled_from([-1, 257, 300, 1000]),
    top_p=st.sampled_from([0.3117, 0.913, 1.0]),
)
def test_flat_rows_keep_hundreds_of_tokens_as_naively(
    seed: int, spread: float, top_k: int, top_p: float
) -> None:
    generator = np.random.default_rng(seed)
    logits = (generator.normal(size=600) * spread).astype(np.float32)
    logits[::7] = logits[0]
    logits[1] = -math.inf
    row = RowSampling(top_k=top_k, top_p=top_p, uniforms=tuple(generator.random(20).tolist()))
    expected = np.cumsum(naive_distribution(logits.tolist(), row))
    for uniform, token in zip(row.uniforms, sample(logits[None], [row]), strict=True):
        if np.abs(expected - uniform).min() > 1e-9:
            assert token == np.searchsorted(expected, uniform, side="right")


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
    logits = np.random.default_rng(1).normal(size=(1, 30), scale=1.5).astype(np.float32)
    num_draws = 20_000
    uniforms = tuple(np.random.default_rng(5).random(num_draws).tolist())
    counts = np.bincount(sample(logits, [replace(row, uniforms=uniforms)]), minlength=30)
    expected = np.array(naive_distribution(logits[0].tolist(), row)) * num_draws
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = int(likely.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile 1 - 1e-7.
    quantile = freedom * (1 - 2 / (9 * freedom) + 5.2 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < quantile


def test_temperature_0_and_top_k_1_are_the_same_and_take_the_first_of_equals() -> None:
    logits = np.random.default_rng(4).normal(size=(64, 50), scale=2).round()
    cold = sample(logits, [RowSampling(temperature=0.0, uniforms=(0.9, 0.1))] * 64)
    single = sample(logits, [RowSampling(temperature=5.0, top_k=1, uniforms=(0.9,))] * 64)
    # A random row in the batch takes it off the path of plain greedy batches.
    mixed = [RowSampling(temperature=0.0)] * 63 + [RowSampling(min_p=1.0)]
    first = [row.index(max(row)) for row in logits.tolist()]
    assert cold == single == first
    assert sample(logits, mixed) == first


def random_row(generator: np.random.Generator, vocab_size: int) -> RowSampling:
    """Parameters of all kinds, in all combinations."""

    def ids(num: int) -> tuple[int, ...]:
        return tuple(generator.integers(0, vocab_size, num).tolist())

    edits = LogitsEdits(
        prompt_token_ids=ids(20),
        output_token_ids=ids(20),
        presence_penalty=float(generator.choice([0.0, 0.7])),
        frequency_penalty=float(generator.choice([0.0, 0.3])),
        repetition_penalty=float(generator.choice([1.0, 1.3])),
        logit_bias=tuple((token, 2.5) for token in ids(3)),
        allowed_token_ids=ids(50) if generator.random() < 0.3 else None,
        banned_token_ids=ids(3),
        top_n_sigma=float(generator.choice([-1.0, 2.0])),
    )
    return RowSampling(
        temperature=float(generator.choice([0.0, 0.5, 1.0, 3.0])),
        top_k=int(generator.choice([-1, 1, 5, 400])),
        top_p=float(generator.choice([0.2, 0.9, 0.999, 1.0])),
        min_p=float(generator.choice([0.0, 0.05])),
        uniforms=tuple(generator.random(int(generator.integers(1, 5))).tolist()),
        edits=edits if generator.random() < 0.5 else None,
        num_logprobs=(None, 0, 3)[int(generator.integers(3))],
        num_candidates=int(generator.choice([0, 0, 0, 4])),
    )


def test_rows_are_independent_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostOps, "max_elements", 700 * 7)
    generator = np.random.default_rng(2)
    logits = generator.normal(size=(96, 700), scale=2).astype(np.float32)
    given = logits.copy()
    rows = [random_row(generator, 700) for _ in range(96)]
    together = Sampler().sample(logits, rows)
    assert np.array_equal(logits, given)
    assert together.candidates is not None
    for index, row in enumerate(rows):
        alone = Sampler().sample(logits[index : index + 1], [row])
        start, end = together.draw_start[index : index + 2]
        assert end - start == row.num_draws
        assert together.tokens[start:end].tolist() == alone.tokens.tolist()
        if alone.candidates is not None:
            assert (
                together.candidates.token_ids[index].tolist()
                == alone.candidates.token_ids[0].tolist()
            )
            assert together.candidates.logprobs[index] == pytest.approx(
                alone.candidates.logprobs[0]
            )


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_draws_from_one_row_equal_draws_one_by_one(seed: int) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(1, 300)).astype(np.float32)
    row = replace(random_row(generator, 300), temperature=0.8, top_k=-1, num_candidates=0)
    together = Sampler().sample(logits, [row]).tokens.tolist()
    rows = [replace(row, uniforms=(uniform,)) for uniform in row.uniforms]
    assert together == [sample(logits, [single])[0] for single in rows]


def test_top_p_reaches_beyond_the_first_candidates() -> None:
    logits = [0.001 * token for token in range(5000)]
    row = RowSampling(top_p=0.93, uniforms=(0.0,))
    assert sample([logits], [row])[0] == naive_token(logits, row)


def test_the_largest_uniform_takes_the_last_kept_token() -> None:
    uniform = math.nextafter(1.0, 0.0)
    logits = np.zeros((1, 49_152), np.float32)
    logits[0, 49_000:] = -1e9
    assert sample(logits, [RowSampling(uniforms=(uniform,))]) == [48_999]


@pytest.mark.parametrize("temperature", [1e-6, 5e-324])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    logits = [[1000.0, 999.0, -1000.0]]
    row = RowSampling(temperature=temperature, top_p=0.9, uniforms=(0.99,))
    assert sample(logits, [row]) == [0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "the logits hold NaN"),
        (math.inf, "the logits hold infinity"),
        (-math.inf, "no token is left to sample: the logits are all -inf"),
    ],
)
@pytest.mark.parametrize(
    "row",
    [
        RowSampling(temperature=0.0),
        RowSampling(top_p=0.9, uniforms=(0.3, 0.6), num_logprobs=2),
        RowSampling(num_candidates=2),
        RowSampling(edits=LogitsEdits(allowed_token_ids=(1,))),
    ],
)
def test_unusable_logits_fail_their_row_alone(value: float, reason: str, row: RowSampling) -> None:
    logits = np.array([[0.0, 1.0, 2.0]] * 3, np.float32)
    logits[1, 0 if value > 0 else slice(None)] = value
    others = RowSampling(temperature=0.0), RowSampling(uniforms=(0.999,))
    sampled = Sampler().sample(logits, [others[0], row, others[1]])
    assert sampled.errors == {1: reason}
    assert sampled.tokens.tolist() == [2, *([0] * row.num_draws), 2]


def test_a_step_without_rows_gives_nothing() -> None:
    sampled = Sampler().sample(np.zeros((0, 5), np.float32), [])
    assert sampled.tokens.tolist() == []
    assert sampled.draw_start.tolist() == [0]
    assert (sampled.logprobs, sampled.candidates, sampled.errors) == (None, None, {})


@pytest.mark.parametrize("top_k", [2, 255, 256, 257, 599])
def test_equal_tokens_are_all_kept_however_many(top_k: int) -> None:
    uniforms = (0.0, 0.25, 0.5, 0.999)
    row = RowSampling(top_k=top_k, top_p=0.9, uniforms=uniforms)
    sampled = Sampler().sample(np.zeros((2, 600), np.float32), [row, RowSampling(uniforms=(0.5,))])
    assert sampled.tokens.tolist() == [*(int(600 * u) for u in uniforms), 300]

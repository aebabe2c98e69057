import math

import numpy as np
import pytest

from pagedserve.bench.arrivals import arrival_times

MANY = 20_000


def gaps(burstiness: float, *, rate: float = 5.0, seed: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.diff(arrival_times(MANY, rate=rate, burstiness=burstiness, rng=rng), prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 8.0])
def test_gaps_are_those_of_a_gamma_distribution(burstiness: float) -> None:
    found = gaps(burstiness)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(MANY / 5.0)
    # Its coefficient of variation is one over the root of the shape.
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_burstiness_of_one_is_a_poisson_process() -> None:
    rate = 5.0
    found = gaps(1.0, rate=rate)
    # Exponential gaps: the share of those longer than t is exp(-rate * t), for any t.
    for seconds in (0.05, 0.2, 0.5):
        assert (found > seconds).mean() == pytest.approx(math.exp(-rate * seconds), abs=0.01)
    # And independent: a gap says nothing of the next.
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02
    counts = np.bincount(np.cumsum(found).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("num_requests", [1, 2, 50])
def test_the_rate_of_few_requests_is_what_was_asked_for(num_requests: int) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        times = arrival_times(num_requests, rate=4.0, burstiness=1.0, rng=rng)
        assert times[-1] == pytest.approx(num_requests / 4.0)
        assert (np.diff(times) >= 0).all()


def test_a_seed_decides_the_times() -> None:
    assert np.array_equal(gaps(1.0, seed=1), gaps(1.0, seed=1))
    assert not np.array_equal(gaps(1.0, seed=1), gaps(1.0, seed=2))

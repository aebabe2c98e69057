"""The figures, against numpy on the same times and against small sums done by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from pagedserve.bench.figures import Figures, figures_of
from pagedserve.bench.metrics import METRICS
from pagedserve.bench.outcome import REFUSED, TIMEOUT, Failure, Outcome

PERCENTS = (50.0, 90.0, 99.0)


def answered(
    started: float,
    times: Sequence[float],
    *,
    due: float | None = None,
    tokens: int | None = None,
    end: float | None = None,
) -> Outcome:
    """A request whose pieces of output came at these moments."""
    return Outcome(
        due=started if due is None else due,
        started=started,
        num_input_tokens=10,
        num_output_tokens=tokens,
        output_times=list(times),
        ended=times[-1] if end is None else end,
    )


def failed(kind: str) -> Outcome:
    return Outcome(due=0.0, started=0.0, num_input_tokens=10, failure=Failure(kind, "so"))


def figures(outcomes: Sequence[Outcome], **limits: float) -> Figures:
    return figures_of(
        outcomes,
        duration_s=10.0,
        unfinished=0,
        limits=limits,
        metrics=tuple(METRICS),
        percents=PERCENTS,
    )


def random_outcomes(number: int) -> list[Outcome]:
    rng = np.random.default_rng(5)
    outcomes = []
    for _ in range(number):
        started = rng.uniform(0, 8)
        times = started + np.cumsum(rng.exponential(0.05, size=rng.integers(1, 40)))
        outcomes.append(
            answered(started, times.tolist(), due=started - rng.uniform(0, 0.1), tokens=len(times))
        )
    return outcomes


def test_times_are_summed_up_as_numpy_does() -> None:
    outcomes = random_outcomes(200)
    first = [outcome.output_times[0] - outcome.started for outcome in outcomes]
    last = [outcome.output_times[-1] - outcome.started for outcome in outcomes]
    queued = [outcome.started - outcome.due for outcome in outcomes]
    samples = {
        "ttft": first,
        "tpot": [
            (end - begin) / (len(outcome.output_times) - 1)
            for outcome, begin, end in zip(outcomes, first, last, strict=True)
            if len(outcome.output_times) > 1
        ],
        "itl": np.concatenate([np.diff(outcome.output_times) for outcome in outcomes]),
        "e2el": last,
        "client_queue_time": queued,
        "e2el_including_client_queue": np.add(last, queued),
    }
    found = figures(outcomes).times
    assert found.keys() == samples.keys()
    for key, seconds in samples.items():
        milliseconds = np.asarray(seconds) * 1000
        assert found[key].mean == pytest.approx(milliseconds.mean())
        assert found[key].median == pytest.approx(np.median(milliseconds))
        assert found[key].std == pytest.approx(milliseconds.std())
        assert list(found[key].percentiles) == list(PERCENTS)
        assert list(found[key].percentiles.values()) == pytest.approx(
            np.percentile(milliseconds, PERCENTS)
        )


def test_counts_and_rates() -> None:
    found = figures([answered(0, [1.0, 1.5], tokens=6), answered(0, [2.0], tokens=1)])
    assert (found.completed, found.failed) == (2, 0)
    assert (found.num_input_tokens, found.num_output_tokens) == (20, 7)
    assert found.per_second(found.num_output_tokens) == pytest.approx(0.7)


def test_an_answer_of_several_tokens_a_piece_spreads_its_time_over_them() -> None:
    found = figures([answered(0, [0.1, 0.14, 0.18], tokens=5)]).times
    assert found["tpot"].mean == pytest.approx(20.0)
    assert found["itl"].mean == pytest.approx(40.0)


def test_what_failed_counts_by_its_kind_and_nowhere_else() -> None:
    outcomes = [failed(REFUSED), answered(0, [1.0], tokens=3), failed(TIMEOUT), failed(REFUSED)]
    found = figures(outcomes)
    assert found.failures == {REFUSED: 2, TIMEOUT: 1}
    assert (found.completed, found.failed) == (1, 3)
    assert (found.num_input_tokens, found.num_output_tokens) == (10, 3)
    assert found.times["ttft"].mean == pytest.approx(1000.0)


def test_without_an_answer_there_are_no_times() -> None:
    found = figures([failed(REFUSED)], ttft=1.0)
    assert (found.completed, found.good, found.peak_concurrency) == (0, 0, 0)
    assert found.peak_output_throughput == 0
    times = found.times["itl"]
    assert (times.mean, times.median, times.std) == (None, None, None)
    assert times.percentiles == dict.fromkeys(PERCENTS)


def test_goodput_wants_every_limit_kept() -> None:
    outcomes = [
        answered(0, [0.1, 0.2, 0.3], tokens=3),  # 100 ms, then 100 a token, 300 in all
        answered(0, [0.2, 0.25, 0.3], tokens=3),  # 200 ms, then 50 a token, 300 in all
        answered(0, [0.1, 0.15, 0.9], tokens=3),  # 100 ms, then 400 a token, 900 in all
        answered(0, [0.1], tokens=1),  # one token: none after it was late
        failed(REFUSED),
    ]
    assert figures(outcomes).good is None
    assert figures(outcomes, ttft=150).good == 3
    assert figures(outcomes, tpot=101).good == 3
    assert figures(outcomes, e2el=301).good == 3
    assert figures(outcomes, ttft=150, tpot=101).good == 2
    assert figures(outcomes, ttft=150, tpot=60, e2el=301).good == 1


def test_without_the_server_s_count_pieces_are_counted() -> None:
    found = figures([answered(0, [0.1, 0.2, 0.4]), answered(0, [0.1], tokens=8)])
    assert (found.num_output_tokens, found.num_counted_by_chunks) == (11, 1)
    assert found.times["tpot"].mean == pytest.approx(150.0 / 2)


def test_an_answer_without_text_came_when_it_ended() -> None:
    silent = Outcome(due=0, started=1, num_input_tokens=4, num_output_tokens=1, ended=3.0)
    found = figures([silent])
    assert found.times["ttft"].mean == found.times["e2el"].mean == pytest.approx(2000.0)
    assert found.times["itl"].mean is None
    assert found.num_output_tokens == 1


def test_the_end_of_an_answer_can_come_after_its_last_piece() -> None:
    found = figures([answered(0, [0.1, 0.3], tokens=2, end=0.5)]).times
    assert found["e2el"].mean == pytest.approx(500.0)
    assert found["itl"].mean == pytest.approx(200.0)
    assert found["tpot"].mean == pytest.approx(400.0)


def test_peaks() -> None:
    outcomes = [
        answered(0.0, [1.0, 1.1, 1.2], tokens=6),
        answered(1.2, [1.5, 2.4], tokens=2),  # begins as the first ends
        answered(1.3, [2.1, 2.2], tokens=2),
    ]
    found = figures(outcomes)
    # Seconds count from the first output: 6 tokens and 1 in the first, 1 and 2 in the second.
    assert found.peak_output_throughput == pytest.approx(7.0)
    assert found.peak_concurrency == 2

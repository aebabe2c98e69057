"""The figures of a run, made of what came of its requests.

Rates are divided by the whole duration of the run, its slow end included.  Times are those of the
requests that were answered in full; the tokens of all others count nowhere.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pagedserve.bench.metrics import GOODPUT_METRICS, METRICS
from pagedserve.bench.outcome import Outcome

_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Samples of one kind of time in milliseconds, summed up.

    Attributes:
        mean: Their mean, as all others None where there are no samples.
        median: The middle one.
        std: The standard deviation of these very samples.
        percentiles: By percent, linear between two samples.
    """

    mean: float | None
    median: float | None
    std: float | None
    percentiles: Mapping[float, float | None]

    @classmethod
    def of(cls, seconds: Sequence[float], percents: Sequence[float]) -> "Distribution":
        """Sum up samples in seconds."""
        if not seconds:
            return cls(None, None, None, dict.fromkeys(percents))
        samples = np.asarray(seconds) * _MS
        found = np.percentile(samples, percents).tolist()
        return cls(
            mean=float(samples.mean()),
            median=float(np.median(samples)),
            std=float(samples.std()),
            percentiles=dict(zip(percents, found, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run found.

    Attributes:
        duration_s: From the start of the run to its last answer, or to Ctrl-C.
        completed: Requests that were answered in full.
        failures: Requests that failed, by kind.
        unfinished: Requests that Ctrl-C came before.
        num_input_tokens: Of the completed ones.
        num_output_tokens: Likewise.
        num_counted_by_chunks: Completed requests whose server did not count output tokens, so that
            pieces of output were counted.
        good: Completed requests within all limits; None where there are no limits.
        peak_output_throughput: Output tokens of the fullest second.
        peak_concurrency: Requests, of the completed ones, that were on their way at one moment.
        times: By the key of the metric.
    """

    duration_s: float
    completed: int
    failures: Mapping[str, int]
    unfinished: int
    num_input_tokens: int
    num_output_tokens: int
    num_counted_by_chunks: int
    good: int | None
    peak_output_throughput: float
    peak_concurrency: int
    times: Mapping[str, Distribution]

    @property
    def failed(self) -> int:
        """How many requests failed."""
        return sum(self.failures.values())

    def per_second(self, count: float) -> float:
        """A count divided by the duration."""
        return count / self.duration_s if self.duration_s > 0 else 0.0


def figures_of(
    outcomes: Sequence[Outcome],
    *,
    duration_s: float,
    unfinished: int,
    limits: Mapping[str, float],
    metrics: Sequence[str],
    percents: Sequence[float],
) -> Figures:
    """The figures of a run.

    Args:
        outcomes: Of every request that came to its end.
        duration_s: Of the run.
        unfinished: How many did not.
        limits: On times of a request, in milliseconds by the key of the metric; {} for none.
        metrics: Keys of the times to report.
        percents: Which percentiles of them.
    """
    done = [outcome for outcome in outcomes if outcome.failure is None]
    kinds = Counter(outcome.failure.kind for outcome in outcomes if outcome.failure is not None)
    return Figures(
        duration_s=duration_s,
        completed=len(done),
        failures=dict(sorted(kinds.items())),
        unfinished=unfinished,
        num_input_tokens=sum(outcome.num_input_tokens for outcome in done),
        num_output_tokens=sum(outcome.output_tokens() for outcome in done),
        num_counted_by_chunks=sum(outcome.num_output_tokens is None for outcome in done),
        good=sum(_is_good(outcome, limits) for outcome in done) if limits else None,
        peak_output_throughput=_peak_output_throughput(done),
        peak_concurrency=_peak_concurrency(done),
        times={
            key: Distribution.of(
                [sample for outcome in done for sample in METRICS[key].samples(outcome)], percents
            )
            for key in metrics
        },
    )


def _is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    return all(GOODPUT_METRICS[key](outcome) * _MS <= limit for key, limit in limits.items())


def _peak_output_throughput(done: Sequence[Outcome]) -> float:
    """Tokens of the fullest second, where the pieces of one answer weigh the same."""
    moments = np.array([moment for outcome in done for moment in outcome.output_times])
    if not len(moments):
        return 0.0
    weights = np.concatenate(
        [
            np.full(len(outcome.output_times), outcome.output_tokens() / len(outcome.output_times))
            for outcome in done
            if outcome.output_times
        ]
    )
    seconds = (moments - moments.min()).astype(np.int64)
    return float(np.bincount(seconds, weights=weights).max())


def _peak_concurrency(done: Sequence[Outcome]) -> int:
    """How many intervals from sending to the end have a moment in common, at most."""
    changes = [(outcome.started, 1) for outcome in done]
    changes += [(outcome.end(), -1) for outcome in done]
    running = np.cumsum([change for _, change in sorted(changes)])
    return int(running.max(initial=0))

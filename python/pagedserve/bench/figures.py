"""Statistics of a run, from the outcomes of its requests.

Rates are divided by the whole duration of the run.  Times are those of completed requests; the
tokens of other requests count nowhere.
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
    """Statistics of one metric, in milliseconds.

    Attributes:
        mean: Mean; None without samples, as all others.
        median: Median.
        std: Standard deviation of the samples.
        percentiles: Percentiles by percent, with linear interpolation.
    """

    mean: float | None
    median: float | None
    std: float | None
    percentiles: Mapping[float, float | None]

    @classmethod
    def of(cls, seconds: Sequence[float], percents: Sequence[float]) -> "Distribution":
        """Compute the statistics of samples in seconds."""
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
    """Results of a run.

    Attributes:
        duration_s: Seconds from the start of the run to its last response, or to Ctrl-C.
        completed: Number of completed requests.
        failures: Number of failed requests, by kind.
        unfinished: Number of requests interrupted by Ctrl-C.
        num_input_tokens: Input tokens of the completed ones.
        num_output_tokens: Output tokens of the completed ones.
        num_counted_by_chunks: Completed requests whose server did not count output tokens, so that
            chunks of output were counted.
        good: Completed requests within all limits; None without limits.
        peak_output_throughput: Output tokens of the second with the most.
        peak_concurrency: Maximum number of concurrent requests, among completed ones.
        times: Statistics by the key of the metric.
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
        """Number of failed requests."""
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
    """Compute the results of a run.

    Args:
        outcomes: Outcomes of all requests that ended.
        duration_s: Duration of the run.
        unfinished: Number of requests that did not end.
        limits: Limits of a request's times, in milliseconds by the key of the metric; {} for none.
        metrics: Keys of the metrics to report.
        percents: Percentiles to report.
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
    """Tokens of the second with the most; the chunks of one response have equal weight."""
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
    """Maximum number of intervals from sending to the end that overlap at one time."""
    changes = [(outcome.started, 1) for outcome in done]
    changes += [(outcome.end(), -1) for outcome in done]
    running = np.cumsum([change for _, change in sorted(changes)])
    return int(running.max(initial=0))

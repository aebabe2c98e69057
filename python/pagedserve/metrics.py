"""The metrics that ``LLM.get_metrics`` returns, in vLLM's shapes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pagedserve.engine.metric_families import Family
from pagedserve.engine.stats import Histogram as Counts

# Label of the elements of a vector.
_POSITION = "position"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: Name, as in a server's ``/metrics``; without ``_total`` for a counter.
        labels: Labels.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters in order, such as the accepted draft tokens of each position."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A current value that may rise and fall."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Distribution of values in buckets.

    Attributes:
        count: Number of values.
        sum: Sum of the values.
        buckets: Number of values at most each upper bound, which is text; the last is ``+Inf``.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(families: Iterable[Family]) -> Iterator[Metric]:
    """Convert metric families to metrics, one per sample, or one per vector."""
    for family in families:
        if family.samples and _POSITION in family.samples[0][0]:
            yield _vector(family)
            continue
        for labels, value in family.samples:
            if isinstance(value, Counts):
                buckets = dict(value.buckets())
                yield Histogram(family.name, dict(labels), sum(value.counts), value.total, buckets)
            elif family.kind == "counter":
                yield Counter(family.name, dict(labels), int(value))
            else:
                yield Gauge(family.name, dict(labels), float(value))


def _vector(family: Family) -> Vector:
    labels = {name: value for name, value in family.samples[0][0].items() if name != _POSITION}
    values = [int(value) for _, value in family.samples if not isinstance(value, Counts)]
    return Vector(family.name, labels, values)

"""Metrics as prometheus_client wants them, made when somebody scrapes."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pagedserve.engine.stats import Histogram

Labels: TypeAlias = Mapping[str, str]


def gauge(name: str, text: str, *samples: tuple[Labels, float]) -> Metric:
    """A gauge; its samples have the same labels, in the same order."""
    family = GaugeMetricFamily(name, text, labels=_names(samples))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def counter(name: str, text: str, *samples: tuple[Labels, float]) -> Metric:
    """A counter, shown as ``name`` and ``_total``."""
    family = CounterMetricFamily(name, text, labels=_names(samples))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def histogram(name: str, text: str, *samples: tuple[Labels, Histogram]) -> Metric:
    """A histogram."""
    family = HistogramMetricFamily(name, text, labels=_names(samples))
    for labels, counted in samples:
        buckets, sum_so_far = [], 0
        for bound, count in zip((*counted.bounds, None), counted.counts, strict=True):
            sum_so_far += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), sum_so_far))
        family.add_metric(list(labels.values()), buckets, counted.total)
    return family


def _names(samples: Iterable[tuple[Labels, object]]) -> list[str]:
    return next((list(labels) for labels, _ in samples), [])

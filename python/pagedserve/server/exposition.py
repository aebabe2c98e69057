"""Conversion of metric families to prometheus_client's, at each scrape."""

from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from pagedserve.engine.metric_families import Family
from pagedserve.engine.stats import Histogram

_FAMILIES: Final[dict[str, Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def prometheus_metric(family: Family) -> Metric:
    """Convert a family for Prometheus; a counter gets the suffix ``_total``."""
    names = list(family.samples[0][0]) if family.samples else []
    shown = _FAMILIES[family.kind](family.name, family.text, labels=names)
    for labels, value in family.samples:
        values = list(labels.values())
        if isinstance(value, Histogram):
            buckets = [(bound, float(number)) for bound, number in value.buckets()]
            shown.add_metric(values, buckets, value.total)
        else:
            shown.add_metric(values, value)
    metric: Metric = shown
    return metric

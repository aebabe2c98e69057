"""``/metrics``: metrics of requests, of HTTP, of the engine and of the process.

Requests are counted as they happen; the engine's metrics are read at each scrape, so they are
current also while no step runs.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.types import Scope

from pagedserve.engine.client import EngineClient
from pagedserve.engine.engine_metrics import EngineMetrics
from pagedserve.engine.metric_families import Family, counter, engine_labels, histogram
from pagedserve.engine.request_metrics import RequestCounts
from pagedserve.engine.stats import Histogram
from pagedserve.server.limits import Admission

# Upper bounds of the durations of HTTP requests.
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# Other methods share one label: a client may send any, and labels are kept indefinitely.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FAMILIES: Final[dict[str, Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class HttpMetrics:
    """Counts requests at the end of their responses, streams included.

    The names are those of prometheus-fastapi-instrumentator.
    """

    def __init__(self) -> None:
        """Start to count."""
        self._answered: dict[tuple[str, str, str], int] = {}
        self._seconds: dict[tuple[str, str], Histogram] = {}

    def request_ended(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request.

        Args:
            scope: ASGI scope, after the routes changed it.
            status: Status of the response.
            seconds: Seconds from the first byte of the request to the last of its response.
        """
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        counted = (handler, method, f"{status // 100}xx")
        self._answered[counted] = self._answered.get(counted, 0) + 1
        self._seconds.setdefault(counted[:2], Histogram(_SECONDS)).observe(seconds)

    def families(self) -> Iterator[Family]:
        """Metrics of the counted requests."""
        yield counter(
            "http_requests",
            "Finished HTTP requests.",
            *(
                ({"handler": handler, "method": method, "status": status}, count)
                for (handler, method, status), count in self._answered.items()
            ),
        )
        yield histogram(
            "http_request_duration_seconds",
            "Seconds from the first byte of a request to the last of its response.",
            *(
                ({"handler": handler, "method": method}, seconds)
                for (handler, method), seconds in self._seconds.items()
            ),
        )


def _prometheus_metric(family: Family) -> Metric:
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


class Metrics(RequestCounts):
    """All metrics of a server.

    Attributes:
        http: Metrics of requests over HTTP.
    """

    def __init__(self, client: EngineClient, model_name: str, admission: Admission) -> None:
        """Start to count.

        Args:
            client: Source of the engine's snapshots.
            model_name: Label of all metrics.
            admission: Source of the numbers of refused requests.
        """
        labels = engine_labels(model_name)
        super().__init__(labels)
        self.http = HttpMetrics()
        self._client = client
        self._admission = admission
        self._engine = EngineMetrics(labels)
        self._rendering = asyncio.Lock()

    async def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format.

        The values are read at once; a quarter of a megabyte of text takes 20 ms, so a thread
        renders it, for one scrape at a time.
        """
        async with self._rendering:
            return await asyncio.to_thread(generate_latest, _Shown(list(self._read())))

    def _read(self) -> Iterator[Family]:
        """All metrics but those of the process; those of the engine once it is created."""
        yield from self.families()
        refused = self._admission.num_refused
        yield self.by("admission_rejections", "Refused requests.", "reason", refused)
        yield from self.http.families()
        if self._client.is_running:
            yield from self._engine.families(self._client.snapshot())


class _Shown(Collector):
    """Metrics of the process, then families that were read."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            yield from collector.collect()
        yield from map(_prometheus_metric, self._families)

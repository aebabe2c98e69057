"""``/metrics``: metrics of requests, of HTTP, of the engine and of the process.

Requests are counted as they happen; the engine's metrics are read at each scrape, so they are
current also while no step runs.
"""

from collections.abc import Iterable

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    generate_latest,
)
from prometheus_client.core import Metric

from pagedserve.engine.client import EngineClient
from pagedserve.engine.engine_metrics import EngineMetrics
from pagedserve.engine.metric_families import engine_labels
from pagedserve.engine.request_metrics import RequestCounts
from pagedserve.server.exposition import prometheus_metric
from pagedserve.server.http_metrics import HttpMetrics
from pagedserve.server.limits import Admission


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
        self._registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self._registry.register(collector)
        self._registry.register(self)

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """All metrics but those of the process; those of the engine once it is created."""
        refused = self._admission.num_refused
        families = [
            *self.families(),
            self.by("admission_rejections", "Refused requests.", "reason", refused),
            *self.http.families(),
            *(self._engine.families(self._client.snapshot()) if self._client.is_running else ()),
        ]
        return map(prometheus_metric, families)

"""What is measured of requests over HTTP, by the names of prometheus-fastapi-instrumentator."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import Metric
from starlette.types import Scope

from pagedserve.engine.stats import Histogram
from pagedserve.server.exposition import counter, histogram

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# A client may send any; each that is counted by its own name is kept for ever.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    """Counts requests when they have been answered, streams included."""

    def __init__(self) -> None:
        """Begin to count."""
        self._answered: dict[tuple[str, str, str], int] = {}
        self._seconds: dict[tuple[str, str], Histogram] = {}

    def request_ended(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request.

        Args:
            scope: Of ASGI, as the routes left it.
            status: What was answered.
            seconds: From its first byte to the last of its answer.
        """
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        counted = (handler, method, f"{status // 100}xx")
        self._answered[counted] = self._answered.get(counted, 0) + 1
        self._seconds.setdefault(counted[:2], Histogram(_SECONDS)).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        yield counter(
            "http_requests",
            "Requests over HTTP that were answered.",
            *(
                ({"handler": handler, "method": method, "status": status}, count)
                for (handler, method, status), count in self._answered.items()
            ),
        )
        yield histogram(
            "http_request_duration_seconds",
            "First byte of a request to the last of its answer.",
            *(
                ({"handler": handler, "method": method}, seconds)
                for (handler, method), seconds in self._seconds.items()
            ),
        )

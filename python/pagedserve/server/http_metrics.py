"""Metrics of HTTP requests, with the names of prometheus-fastapi-instrumentator."""

from collections.abc import Iterator
from typing import Final

from starlette.types import Scope

from pagedserve.engine.metric_families import Family, counter, histogram
from pagedserve.engine.stats import Histogram

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# Other methods share one label: a client may send any, and labels are kept indefinitely.
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    """Counts requests at the end of their responses, streams included."""

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

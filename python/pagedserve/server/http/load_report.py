"""Load reports of ORCA, by which load balancers choose a server, in a header of responses."""

import json
from collections.abc import Callable
from typing import Final

from pagedserve.engine.stats import EngineSnapshot

# Header of a request with the format of the report, and that of a response with the report.
FORMAT_HEADER: Final = "endpoint-load-metrics-format"
_REPORT_HEADER: Final = b"endpoint-load-metrics"


def _text(metrics: dict[str, float]) -> str:
    return ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())


def _json(metrics: dict[str, float]) -> str:
    return json.dumps({"named_metrics": metrics})


_FORMATS: Final[dict[str, Callable[[dict[str, float]], str]]] = {"TEXT": _text, "JSON": _json}


def load_report(
    given: str | None, snapshot: Callable[[], EngineSnapshot]
) -> list[tuple[bytes, bytes]]:
    """Header with the load of an engine, with vLLM's metrics.

    Args:
        given: Format that the request names, in any case; others than TEXT and JSON, and None,
            give no header.
        snapshot: Returns the state of the engine.
    """
    name = (given or "").upper()
    form = _FORMATS.get(name)
    if form is None:
        return []
    engine = snapshot()
    metrics = {
        "num_requests_waiting": float(engine.num_waiting),
        "kv_cache_usage_perc": float(engine.gpu_cache_usage),
    }
    return [(_REPORT_HEADER, f"{name} {form(metrics)}".encode())]

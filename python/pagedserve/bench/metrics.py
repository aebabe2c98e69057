"""Metrics of a run: one table, with the names of ``vllm bench serve``."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagedserve.bench.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of request times.

    Attributes:
        key: Name in options and results.
        label: Name in the table.
        title: Heading of its section of the table.
        samples: Returns its values for a completed request, in seconds.
    """

    key: str
    label: str
    title: str
    samples: Callable[[Outcome], Iterable[float]]


def _tpots(outcome: Outcome) -> Iterable[float]:
    tpot = outcome.tpot()
    return () if tpot is None else (tpot,)


METRICS = {
    metric.key: metric
    for metric in (
        Metric("ttft", "TTFT", "Time to First Token", lambda outcome: (outcome.ttft(),)),
        Metric("tpot", "TPOT", "Time per Output Token (excl. 1st token)", _tpots),
        Metric("itl", "ITL", "Inter-token Latency", Outcome.itls),
        Metric("e2el", "E2EL", "End-to-end Latency", lambda outcome: (outcome.e2el(),)),
        Metric(
            "client_queue_time",
            "Client Queue Time",
            "Client-side Queueing",
            lambda outcome: (outcome.client_queue_time(),),
        ),
        Metric(
            "e2el_including_client_queue",
            "E2EL incl. Client Queue",
            "Queue-inclusive End-to-end Latency",
            lambda outcome: (outcome.client_queue_time() + outcome.e2el(),),
        ),
    )
}

# Metrics that may be limited: those with one value per request.  A request without a second token
# has no time per output token, and so satisfies any limit on it.
GOODPUT_METRICS: dict[str, Callable[[Outcome], float]] = {
    "ttft": Outcome.ttft,
    "tpot": lambda outcome: outcome.tpot() or 0.0,
    "e2el": Outcome.e2el,
}

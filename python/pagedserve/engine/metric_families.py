"""Metrics as plain values: for Prometheus, and for ``LLM.get_metrics``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pagedserve.engine.stats import Histogram

Labels: TypeAlias = Mapping[str, str]


def engine_labels(model_name: str) -> Labels:
    """Labels of all metrics of an engine, those of vLLM."""
    return {"model_name": model_name, "engine": "0"}


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics of one name.

    Attributes:
        kind: Type of the metrics.
        name: Name in Prometheus; without ``_total`` for a counter.
        text: Description.
        samples: Labels and value of each; all have the same labels in the same order.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    text: str
    samples: tuple[tuple[Labels, float | Histogram], ...]


def gauge(name: str, text: str, *samples: tuple[Labels, float]) -> Family:
    """Create a gauge."""
    return Family("gauge", name, text, samples)


def counter(name: str, text: str, *samples: tuple[Labels, float]) -> Family:
    """Create a counter."""
    return Family("counter", name, text, samples)


def histogram(name: str, text: str, *samples: tuple[Labels, Histogram]) -> Family:
    """Create a histogram."""
    return Family("histogram", name, text, samples)

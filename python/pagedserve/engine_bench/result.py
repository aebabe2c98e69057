"""Results of a benchmark: lines for a terminal, and fields by vLLM's names."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from tqdm import tqdm

_PERCENTS = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Results of a run.

    Attributes:
        lines: Lines for a terminal.
        fields: Values that JSON can hold, by vLLM's names.
    """

    lines: Sequence[str]
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Repeated measurements of a time.

    Attributes:
        samples: Seconds of each, in the order of measurement.
    """

    samples: Sequence[float]

    @classmethod
    def measured(cls, number: int, name: str, measure: Callable[[], float]) -> Self:
        """Measure a number of times, with a progress bar of this name on a terminal."""
        return cls([measure() for _ in tqdm(range(number), desc=name, disable=None)])

    @property
    def mean(self) -> float:
        """Mean of the samples, at least one."""
        return float(np.mean(self.samples))

    def percentiles(self) -> dict[int, float]:
        """Percentiles by percent, with linear interpolation."""
        found = np.percentile(self.samples, _PERCENTS).tolist()
        return dict(zip(_PERCENTS, found, strict=True))

    def lines(self, name: str) -> Iterator[str]:
        """Lines for a terminal, with the name of what was measured."""
        yield f"Avg {name}: {self.mean:.4f} seconds"
        for percent, seconds in self.percentiles().items():
            yield f"{percent}% percentile {name}: {seconds:.4f} seconds"

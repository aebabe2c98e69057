"""Progress of a batch: a bar on a terminal, else a line now and then."""

import sys
import time
from typing import Final

from tqdm import tqdm

from pagedserve.models.load.bars import Bar
from pagedserve.models.load.progress import are_bars_shown

# Seconds between two lines.
_INTERVAL: Final = 10.0


class Progress:
    """Counts the lines that this run has worked through, and shows their rate and the time left."""

    def __init__(self, num_lines: int | None, num_before: int) -> None:
        """Begin.

        Args:
            num_lines: Number of lines of the input; None if it is not known.
            num_before: Number of lines that earlier runs have worked through.
        """
        self._total = num_lines
        self._before = num_before
        self._num_new = 0
        self._started = self._shown = time.monotonic()
        self._bar = Bar(total=num_lines, initial=num_before, desc="lines", unit="line", smoothing=0)

    def advance(self) -> None:
        """Count a line."""
        self._num_new += 1
        self._bar.update(1)
        now = time.monotonic()
        if now - self._shown >= _INTERVAL and not are_bars_shown():
            self._shown = now
            self._print()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

    def rate(self) -> str:
        """Lines per second of this run, with the unit."""
        return f"{self._num_new / (time.monotonic() - self._started):.1f} lines/s"

    def _print(self) -> None:
        done = self._before + self._num_new
        text = f"{done} lines, {self.rate()}"
        if self._total is not None:
            seconds = (self._total - done) / self._num_new * (time.monotonic() - self._started)
            left = tqdm.format_interval(max(0.0, seconds))
            text = f"{done} of {self._total} lines, {self.rate()}, {left} left"
        print(text, file=sys.stderr)  # noqa: T201  # for the user

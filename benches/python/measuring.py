"""What the bench scripts measure with: clocks, memory, processor time of others, and the printing.

Only runs whose other_cores (processor time of everybody else, in cores) is near 0 say something
about a program, and only the ratio of two programs measured in turn on one machine.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Self

GIB = 2**30


class Stopwatch:
    """Seconds spent inside functions, measured from outside by wrapping them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does the same and is timed."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += perf_counter() - started
                self.calls += 1

        return timed


class Clock:
    """Seconds that a block takes, and the processor time spent meanwhile, in cores."""

    seconds = own_cores = other_cores = 0.0

    def __enter__(self) -> Self:
        self._busy, self._own, self._started = busy_seconds(), process_time(), perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = perf_counter() - self._started
        own, busy = process_time() - self._own, busy_seconds() - self._busy
        self.own_cores, self.other_cores = own / self.seconds, (busy - own) / self.seconds


class PeakMemory:
    """The largest resident memory of this process while the block runs."""

    def __init__(self, interval: float = 0.2) -> None:
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.gib = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while True:
            resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.gib = max(self.gib, resident_pages * page / GIB)
            if self._stop.wait(self._interval):
                return


def busy_seconds() -> float:
    """Processor time that the whole machine has spent working, over all cores."""
    first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, first_line.split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """The row with no more digits than mean something."""
    return {
        name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()
    }


def report(kind: str, row: dict[str, Any], *, as_json: bool) -> None:
    """Print one object, as a line of JSON or one figure a line."""
    if as_json:
        print(json.dumps({"kind": kind, **rounded(row)}), flush=True)
        return
    print(kind)
    for name, value in rounded(row).items():
        print(f"  {name:<24}{value}", flush=True)


def report_table(kind: str, rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print objects with the same names, as lines of JSON or side by side; None is left blank."""
    if as_json:
        for row in rows:
            report(kind, row, as_json=True)
        return
    texts = [
        ["" if value is None else str(value) for value in rounded(row).values()] for row in rows
    ]
    texts.insert(0, list(rows[0]))
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    print(kind)
    for first, *others in texts:
        cells = (f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True))
        print(f"  {first:<{widths[0]}}", *cells, sep="  ", flush=True)

"""When Python's garbage collector runs: not while a program starts.

Importing torch and transformers creates a million permanent objects, and the collector traverses
all of them each time their number has grown by a quarter: 0.6 of the 3.3 seconds of the imports
(two cores).  One collection at the end covers them: later it would block a step, and every other
thread, for 0.13 seconds.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable automatic garbage collection in this context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.collect(1)  # moves all new objects to the oldest generation
            gc.enable()

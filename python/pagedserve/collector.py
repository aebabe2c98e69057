"""Python's garbage collector, kept from its work while a program starts.

Importing torch and transformers makes a million objects that stay, and the collector walks over
all of them each time their number has grown by a quarter: 0.6 of the 3.3 seconds of the imports
(two cores).  What has come meanwhile is walked over once, at the end: later it would hold up a step
for 0.13 seconds, and every other thread with it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection in this context, as long as nobody else asks for one."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.collect(1)  # all that is new counts as old from here on
            gc.enable()

"""When a server's garbage is collected: not between two tokens.

Full collections traverse the bodies of all requests that are being read, a quarter of a million
lists and objects each, while no other thread runs.  They wait until no request is open.  A server
that is never idle returns freed memory too, and so does one that has come to rest: its last
requests may have left some 20 MB, too few objects for a collection to be due.
"""

import gc
import time
from typing import Final

from pagedserve.host_ops.heap import return_freed_memory

# Seconds after which a server that is never idle collects all the same.
_MAX_WAIT: Final = 60.0
# Seconds without an open request after which a server is at rest.
_REST: Final = 1.0
# Collections of the younger generation after which a full one is due, as Python's own default.
_DUE: Final = 10
_NEVER: Final = 1 << 30


class IdleCollector:
    """Runs a server's full collections: one once it has started, then while it is idle.

    The younger generations are collected as usual.
    """

    def __init__(self) -> None:
        """Take over the full collections: nine while a model is loaded would take 1.5 seconds."""
        self._thresholds = gc.get_threshold()
        self._last = self._last_busy = 0.0
        gc.set_threshold(*self._thresholds[:2], _NEVER)

    def start(self) -> None:
        """Collect, and exempt what is left: the objects of the start."""
        gc.collect()
        gc.freeze()
        self._last = time.monotonic()

    def look(self, *, is_idle: bool) -> None:
        """Collect once the server is at rest; if due, while it is idle or after a busy minute."""
        now = time.monotonic()
        if not is_idle:
            self._last_busy = now
        rests = now - self._last_busy >= _REST and self._last <= self._last_busy
        is_due = gc.get_count()[2] > _DUE and (is_idle or now - self._last >= _MAX_WAIT)
        if not (rests or is_due):
            return
        gc.collect()
        if rests or not is_idle:
            return_freed_memory()  # 15 ms for 180 MB
        self._last = time.monotonic()

    def stop(self) -> None:
        """Undo ``start``: extensions check at exit whether their objects were freed."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

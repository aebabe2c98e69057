"""The clock of requests: the wall clock at the start plus a monotonic clock.

Differences stay correct when the machine's clock is set.  Times for people or other machines,
such as ``created`` of a response, come from ``time.time`` directly.
"""

import time
from typing import Final

_OFFSET: Final = time.time() - time.monotonic()


def request_time() -> float:
    """Seconds since 1970, by the wall clock at the start."""
    return time.monotonic() + _OFFSET

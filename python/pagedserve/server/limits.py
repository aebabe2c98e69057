"""Admission: how many sequences the server takes on, and when another try makes sense.

A place is reserved before anything is done for a request, and given back when its answer ends.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pagedserve.server.errors import ServerError

# The ends of this many sequences tell how fast places become free.
_NUM_ENDS: Final = 64
_MAX_RETRY_AFTER: Final = 60


class Admission:
    """Counts the sequences of requests that have not been answered.

    Attributes:
        max_num_seqs: Sequences that run at once; 0 before the model is loaded.
        num_seqs: Reserved places.
        num_refused: Requests that found none.
    """

    def __init__(self, max_num_queued: int | None) -> None:
        """Set the limit of the queue.

        Args:
            max_num_queued: Sequences that may wait beside those that run; None is four times as
                many.
        """
        self.max_num_seqs = 0
        self.num_seqs = 0
        self.num_refused = 0
        self._max_num_queued = max_num_queued
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)

    @property
    def most(self) -> int:
        """Sequences that may run or wait."""
        queued = self._max_num_queued
        return self.max_num_seqs + (4 * self.max_num_seqs if queued is None else queued)

    @contextmanager
    def place_for(self, num_seqs: int) -> Iterator[None]:
        """Hold places for the sequences of a request.

        Raises:
            ServerError: 503, there is no room; 400, there never will be.
        """
        if num_seqs > self.most:
            raise ServerError(
                400, f"the request has {num_seqs} sequences; at most {self.most} are accepted"
            )
        if self.num_seqs + num_seqs > self.most:
            self.num_refused += 1
            raise ServerError(
                503,
                f"{self.num_seqs} sequences run or wait; at most {self.most} are accepted",
                retry_after=self._retry_after(self.num_seqs + num_seqs - self.most),
            )
        self.num_seqs += num_seqs
        try:
            yield
        finally:
            self.num_seqs -= num_seqs
            self._ends.extend([time.monotonic()] * num_seqs)

    def _retry_after(self, num_missing: int) -> int:
        """Seconds until so many more sequences have ended, at the pace of the last ones."""
        if not self._ends:
            return 1
        seconds = (time.monotonic() - self._ends[0]) / len(self._ends) * num_missing
        return max(1, min(_MAX_RETRY_AFTER, math.ceil(seconds)))

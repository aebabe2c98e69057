"""``RequestOutputKind``: which outputs of a request are returned."""

from enum import Enum


class RequestOutputKind(Enum):
    """Which outputs of a request ``step`` returns.

    CUMULATIVE: one per step with everything so far.  DELTA: one per step with what is new.
    FINAL_ONLY: the last one only.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

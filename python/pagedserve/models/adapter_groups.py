"""``AdapterGroups``: the rows of a forward pass by adapter; the host knows their slots."""

from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# Number of rows, then slots, starts and order of `AdapterGroups`.
AdapterArrays: TypeAlias = tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


class AdapterGroups:
    """Rows sorted by the slots of their adapters; rows without an adapter are in no group.

    Attributes:
        num_rows: number of all rows, T.
        slots: int32 ``[G]``, slots in use, ascending.
        starts: int32 ``[G + 1]``, start of each slot's rows in ``order``.
        order: int32, rows with adapters, ascending within a slot.
    """

    def __init__(self, slots: NDArray[np.int32]) -> None:
        """Sort the rows.

        Args:
            slots: slot of each row, ``[T]``; -1 is the base model.
        """
        self.num_rows = len(slots)
        order = np.argsort(slots, kind="stable").astype(np.int32)
        self.order = order[np.count_nonzero(slots < 0) :]
        self.slots, starts = np.unique(slots[self.order], return_index=True)
        self.starts = np.append(starts, len(self.order)).astype(np.int32)

    @property
    def arrays(self) -> AdapterArrays:
        """Arrays for the Rust kernels."""
        return self.num_rows, self.slots, self.starts, self.order

    def of_slots(self) -> list[tuple[int, NDArray[np.int32]]]:
        """The slots in use, each with its rows."""
        spans = pairwise(self.starts.tolist())
        return [
            (slot, self.order[start:end])
            for slot, (start, end) in zip(self.slots.tolist(), spans, strict=True)
        ]

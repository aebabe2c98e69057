"""Which rows of the forward in progress have adapters, for the modules that add what those give.

Slots are known to the host.  A forward in which no row has an adapter is none in progress here, so
that it costs no module more than a look.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# How many rows there are; slots, starts and order of `AdapterRows`.
AdapterArrays: TypeAlias = tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


class SortedRows(NamedTuple):
    """Rows by the slots of their adapters, as kernels of a GPU read them.

    Attributes:
        starts: int32 ``[num_slots + 1]``, where the rows of each slot begin in ``order``.
        order: int32 ``[T]``; what lies past the last start means nothing.
    """

    starts: Tensor
    order: Tensor


class AdapterRows:
    """Rows sorted by the slots of their adapters; a row without one is in no group.

    Attributes:
        num_rows: all of them, T.
        slots: int32 ``[G]``, those in use, ascending.
        starts: int32 ``[G + 1]``, where the rows of each begin in ``order``.
        order: int32, the rows that have adapters, ascending within a slot.
    """

    def __init__(
        self,
        slots: NDArray[np.int32],
        device: torch.device,
        on_device: SortedRows | None = None,
    ) -> None:
        """Sort.

        Args:
            slots: of each row, ``[T]``; -1 is the base model alone.
            device: of the model.
            on_device: where the same rows are on the device, or will be before they are read.
        """
        self.num_rows = len(slots)
        order = np.argsort(slots, kind="stable").astype(np.int32)
        self.order = order[np.count_nonzero(slots < 0) :]
        self.slots, starts = np.unique(slots[self.order], return_index=True)
        self.starts = np.append(starts, len(self.order)).astype(np.int32)
        self._device = device
        self._on_device = on_device

    @property
    def arrays(self) -> AdapterArrays:
        """What kernels take."""
        return self.num_rows, self.slots, self.starts, self.order

    def starts_of(self, num_slots: int) -> NDArray[np.int32]:
        """Where the rows of each slot begin, in use or not: int32 ``[num_slots + 1]``."""
        return self.starts[np.searchsorted(self.slots, np.arange(num_slots + 1))]

    def on_device(self, num_slots: int) -> SortedRows:
        """The rows on the model's device; brought there if nobody else did."""
        if self._on_device is None:
            order = np.zeros(self.num_rows, dtype=np.int32)
            order[: len(self.order)] = self.order
            arrays = (self.starts_of(num_slots), order)
            self._on_device = SortedRows(*(torch.from_numpy(a).to(self._device) for a in arrays))
        return self._on_device

    @cached_property
    def groups(self) -> list[tuple[int, Tensor]]:
        """The slots in use, each with its rows, int64 on the model's device."""
        rows = torch.from_numpy(self.order).to(self._device, torch.int64)
        parts = rows.split(np.diff(self.starts).tolist())
        return list(zip(self.slots.tolist(), parts, strict=True))


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The rows of a forward.

    Attributes:
        tokens: of the flat batch.
        samples: those that the head computes.
    """

    tokens: AdapterRows
    samples: AdapterRows


_step: ContextVar[StepAdapters | None] = ContextVar("pagedserve_adapters", default=None)


@contextmanager
def adapting(step: StepAdapters) -> Iterator[None]:
    """Let every module that has adapters add them in this context."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_adapters() -> StepAdapters | None:
    """Those of the forward in progress; None where no row has one."""
    return _step.get()

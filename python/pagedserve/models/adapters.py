"""Adapter rows of a forward pass, for the modules that apply adapters; the host knows the slots."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Number of rows, then slots, starts and order of `AdapterRows`.
AdapterArrays: TypeAlias = tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]


class SortedRows(NamedTuple):
    """Rows sorted by the slots of their adapters, in the layout of GPU kernels.

    Attributes:
        starts: int32 ``[num_slots + 1]``, start of each slot's rows in ``order``.
        order: int32 ``[T]``; undefined past the last start.
    """

    starts: Tensor
    order: Tensor


class AdapterRows:
    """Rows sorted by the slots of their adapters; rows without an adapter are in no group.

    Attributes:
        num_rows: number of all rows, T.
        slots: int32 ``[G]``, slots in use, ascending.
        starts: int32 ``[G + 1]``, start of each slot's rows in ``order``.
        order: int32, rows with adapters, ascending within a slot.
    """

    def __init__(
        self,
        slots: NDArray[np.int32],
        device: torch.device,
        on_device: SortedRows | None = None,
    ) -> None:
        """Sort the rows.

        Args:
            slots: slot of each row, ``[T]``; -1 is the base model.
            device: device of the model.
            on_device: the same rows on the device, if they are or will be copied there before use.
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
        """Arrays for the Rust kernels."""
        return self.num_rows, self.slots, self.starts, self.order

    def starts_of(self, num_slots: int) -> NDArray[np.int32]:
        """Start of each slot's rows, in use or not: int32 ``[num_slots + 1]``."""
        return self.starts[np.searchsorted(self.slots, np.arange(num_slots + 1))]

    def on_device(self, num_slots: int) -> SortedRows:
        """The rows on the model's device; copied there if necessary."""
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
    """Adapter rows of a forward pass.

    Attributes:
        tokens: rows of the flat batch.
        samples: rows that the LM head computes.
    """

    tokens: AdapterRows
    samples: AdapterRows

"""Adapter rows of a forward pass, for the modules of a torch model that apply adapters."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.models.adapter_groups import AdapterGroups


class SortedRows(NamedTuple):
    """Rows sorted by the slots of their adapters, in the layout of GPU kernels.

    Attributes:
        starts: int32 ``[num_slots + 1]``, start of each slot's rows in ``order``.
        order: int32 ``[T]``; undefined past the last start.
    """

    starts: Tensor
    order: Tensor


class AdapterRows(AdapterGroups):
    """Rows sorted by the slots of their adapters, on the host and on the model's device."""

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
        super().__init__(slots)
        self._device = device
        self._on_device = on_device

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

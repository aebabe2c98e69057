"""Inputs of all attention calls of a step, and the types shared by all backends."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Derived = TypeVar("Derived")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Parameters of a layer's attention, as in ``pagedserve.kernels.reference.paged_attention``.

    Attributes:
        scale: factor of the scores.
        window: sliding window, or None.
        softcap: cap of the scores, or None.
        sinks: ``[H]`` attention sinks: scores without a value, or None.
        alibi: ``[H]`` ALiBi slopes, or None.
        position_bias: ``[H, N]``, bias of a key n positions before the query, the last for larger
            distances, or None.
        causal: whether a query does not attend to later keys.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    position_bias: Tensor | None = None
    causal: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention function supports it."""
        added = (self.softcap, self.sinks, self.alibi, self.position_bias)
        return all(option is None for option in added)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Layout of a step's rows, as numpy arrays in host memory.

    Attributes:
        query_start: int ``[R + 1]``.
        seq_lens: int ``[R]``.
        block_tables: int ``[R, B]``.
        block_size: tokens per block.
        state_slots: int ``[R]``, slots of recurrent states; None without states.
    """

    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    block_size: int
    state_slots: NDArray[np.int32] | None = None

    @property
    def max_query_len(self) -> int:
        """Queries of the longest row."""
        return int(np.diff(self.query_start).max(initial=0))

    @property
    def max_seq_len(self) -> int:
        """Keys of the longest row."""
        return int(self.seq_lens.max(initial=0))


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows of a step on the device, for kernels.

    The two bounds are host integers: kernels choose their launch parameters by them without device
    synchronization.  They may be larger than the tensors' contents.

    Attributes:
        query_start: int32 ``[R + 1]`` on the model's device.
        seq_lens: int32 ``[R]``, likewise; 0 for a padding row.
        block_tables: int32 ``[R, B]``, likewise.
        max_query_len: upper bound of queries per row.
        max_seq_len: upper bound of keys per row.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, layout: BatchLayout, device: torch.device) -> "DeviceRows":
        """Copy a layout to a device; on the CPU these are views."""
        return cls(
            query_start=torch.from_numpy(layout.query_start).to(device),
            seq_lens=torch.from_numpy(layout.seq_lens).to(device),
            block_tables=torch.from_numpy(layout.block_tables).to(device),
            max_query_len=layout.max_query_len,
            max_seq_len=layout.max_seq_len,
        )


class AttentionMetadata:
    """One step: T tokens of R rows, and values that its layers derive from them.

    Invariant: the arrays are not modified while the step runs; they may be views of buffers that
    the next step fills.  Derived values are computed by the first layer that needs them and cached
    for the others.

    Attributes:
        layout: rows and block tables in host memory.
        slot_mapping: int64 ``[T]`` on the model's device; -1 writes nothing.
    """

    __slots__ = ("_derived", "_rows", "layout", "slot_mapping")

    def __init__(
        self, layout: BatchLayout, slot_mapping: Tensor, rows: DeviceRows | None = None
    ) -> None:
        """Store a step; ``rows`` are its rows on the device, if already copied."""
        self.layout = layout
        self.slot_mapping = slot_mapping
        self._rows = rows
        self._derived: dict[Hashable, object] = {}

    def rows(self) -> DeviceRows:
        """The rows on the device; copied at the first call if they were not given."""
        if self._rows is None:
            self._rows = DeviceRows.of(self.layout, self.slot_mapping.device)
        return self._rows

    def once(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """Return the result of ``make``, computed once per step and ``key``.

        Args:
            key: identifies the result, with all parameters besides the step.
            make: computes the result.
        """
        if key not in self._derived:
            self._derived[key] = make()
        return cast(Derived, self._derived[key])

"""What every attention call of a step reads, and the types that all backends share."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Derived = TypeVar("Derived")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How a layer attends; the words of ``pagedserve.kernels.reference.paged_attention``.

    Attributes:
        scale: factor of the scores.
        window: sliding window, or None.
        softcap: cap of the scores, or None.
        sinks: ``[H]`` scores that take weight and have no value, or None.
        alibi: ``[H]`` slopes of biases that grow with a key's position, or None.
        position_bias: ``[H, N]``, what a key n before a query, or as the last if further, adds to
            its score, or None.
        causal: whether a query sees no key behind its own.
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
        """Whether torch's attention call computes it."""
        added = (self.softcap, self.sinks, self.alibi, self.position_bias)
        return all(option is None for option in added)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the rows of a step lie, as numpy arrays in host memory.

    Attributes:
        query_start: int ``[R + 1]``.
        seq_lens: int ``[R]``.
        block_tables: int ``[R, B]``.
        block_size: tokens of a block.
        state_slots: int ``[R]``, where layers keep states of sequences; None where they do not.
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
    """The rows of a step where kernels read them.

    The two bounds are host integers: kernels choose their launch by them and need not ask the
    device.  They may be larger than what the tensors hold.

    Attributes:
        query_start: int32 ``[R + 1]`` on the model's device.
        seq_lens: int32 ``[R]``, likewise; 0 for a padding row.
        block_tables: int32 ``[R, B]``, likewise.
        max_query_len: no row has more queries.
        max_seq_len: no row has more keys.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, layout: BatchLayout, device: torch.device) -> "DeviceRows":
        """Copies on a device; on the CPU views."""
        return cls(
            query_start=torch.from_numpy(layout.query_start).to(device),
            seq_lens=torch.from_numpy(layout.seq_lens).to(device),
            block_tables=torch.from_numpy(layout.block_tables).to(device),
            max_query_len=layout.max_query_len,
            max_seq_len=layout.max_seq_len,
        )


class AttentionMetadata:
    """One step: T tokens of R rows, and what its layers derive from them.

    Invariant: the arrays are not changed while the step runs; they may be views of buffers that
    the next step fills.  What is derived from them is made by the first layer that asks and kept
    for the others.

    Attributes:
        layout: rows and block tables in host memory.
        slot_mapping: int64 ``[T]`` on the model's device; -1 means do not write.
    """

    __slots__ = ("_derived", "_rows", "layout", "slot_mapping")

    def __init__(
        self, layout: BatchLayout, slot_mapping: Tensor, rows: DeviceRows | None = None
    ) -> None:
        """Take a step; ``rows`` are its rows on the device, where they are there already."""
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
        """What ``make`` returns, called for the first layer of the step that asks for ``key``.

        Args:
            key: names what is made, with all that it depends on beside the step.
            make: makes it.
        """
        if key not in self._derived:
            self._derived[key] = make()
        return cast(Derived, self._derived[key])


class WriteAndAttend(Protocol):
    """What a backend's module has under the name ``write_and_attend``."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        *,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Write the step's keys and values into the pool, then attend over it."""

"""Step buffers as numpy arrays, for an executor of one's own without torch."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import InputBuffers
from pagedserve.errors import StepError
from pagedserve.executor.protocol import CacheShape, StepSizes


class GroupBlocks(NamedTuple):
    """Blocks of a step's rows in a KV group.

    Attributes:
        block_tables: Blocks of each row, int32 ``[R, B]``; of a group of states one state.
        slot_mapping: Slot of each token's keys and values, int64 ``[T]``: block x block size +
            offset, -1 if they are cached already; empty for a group of states.
    """

    block_tables: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The used part of the buffers: valid until the next step is prepared.

    Attributes:
        token_ids: Inputs, rows packed one after another, int32 ``[T]``.
        positions: Position of each token in its sequence, int64 ``[T]``.
        slot_mapping: Slot of each token's keys and values, int64 ``[T]``: block x block size +
            offset, -1 if they are cached already.
        query_start: Start of each row in T, int32 ``[R + 1]``.
        seq_lens: Keys that the row's last token attends to, int32 ``[R]``.
        block_tables: Blocks of each row, int32 ``[R, B]``.
        sample_index: Positions in T that need logits, int32 ``[S]``.
        adapter_slots: Slot of each row's adapter, -1 for none, int32 ``[R]``.
        groups: Blocks in each of `CacheShape.groups`.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    sample_index: NDArray[np.int32]
    adapter_slots: NDArray[np.int32]
    groups: tuple[GroupBlocks, ...] = ()

    def of_group(self, index: int) -> GroupBlocks:
        """Blocks in a KV group, 0 for the first."""
        if index == 0:
            return GroupBlocks(self.block_tables, self.slot_mapping)
        return self.groups[index - 1]

    def of_tokens(self, index: NDArray[np.int32]) -> "StepArrays":
        """The step of these tokens alone, each a row, once keys and values of all are written.

        Args:
            index: Positions in T, int32 ``[N]``, in any order.
        """
        rows = np.searchsorted(self.query_start, index, side="right") - 1
        unwritten = np.full(len(index), -1, np.int64)
        return StepArrays(
            token_ids=self.token_ids[index],
            positions=self.positions[index],
            slot_mapping=unwritten,
            query_start=np.arange(len(index) + 1, dtype=np.int32),
            seq_lens=self.seq_lens[rows] - (self.query_start[rows + 1] - 1 - index),
            block_tables=self.block_tables[rows],
            sample_index=np.arange(len(index), dtype=np.int32),
            adapter_slots=self.adapter_slots[rows],
            groups=tuple(GroupBlocks(group.block_tables[rows], unwritten) for group in self.groups),
        )


class NumpyBuffers:
    """The arrays of a step for a decoder-only model; ``HostBuffers``.

    Attributes:
        query_start: Start of each row in the step's tokens, int32 ``[max_num_rows + 1]``.
        positions: Position of each token in its sequence, int64 ``[max_num_tokens]``.
        sample_rows: Row of each sample, int32 ``[max_num_samples]``.
        row_handles: The scheduler's handle of each row's sequence, int64 ``[max_num_rows]``.
    """

    def __init__(self, shape: CacheShape, *, has_adapters: bool = False) -> None:
        """Allocate the arrays for the largest step.

        Args:
            shape: Shape of the KV cache, with the limits of a step.
            has_adapters: Whether rows may have adapters.

        Raises:
            StepError: The shape has a KV group of an encoder.
        """
        limits = shape.limits
        max_num_rows, max_num_tokens = limits.max_num_rows, limits.max_num_tokens
        max_num_samples = max(max_num_rows, limits.max_num_samples)
        max_num_blocks = max_num_rows * shape.max_blocks_per_row
        self._kinds = [group.kind for group in shape.groups]
        if "cross" in self._kinds:
            raise StepError("these buffers are for decoder-only models, without KV group 'cross'")
        self._groups = [
            GroupBlocks(
                np.zeros(max_num_rows if kind == "state" else max_num_blocks, np.int32),
                np.zeros(0 if kind == "state" else max_num_tokens, np.int64),
            )
            for kind in self._kinds
        ]
        self.query_start = np.zeros(max_num_rows + 1, np.int32)
        self.positions = np.zeros(max_num_tokens, np.int64)
        self.sample_rows = np.zeros(max_num_samples, np.int32)
        self.row_handles = np.zeros(max_num_rows, np.int64)
        self._token_ids = np.zeros(max_num_tokens, np.int32)
        self._slot_mapping = np.zeros(max_num_tokens, np.int64)
        self._seq_lens = np.zeros(max_num_rows, np.int32)
        self._block_tables = np.zeros(max_num_blocks, np.int32)
        self._sample_index = np.zeros(max_num_samples, np.int32)
        self._adapter_slots = np.full(max_num_rows, -1, np.int32)
        self._core = InputBuffers(
            token_ids=self._token_ids,
            positions=self.positions,
            slot_mapping=self._slot_mapping,
            query_start=self.query_start,
            seq_lens=self._seq_lens,
            block_tables=self._block_tables,
            sample_index=self._sample_index,
            sample_rows=self.sample_rows,
            row_handles=self.row_handles,
            adapter_slots=self._adapter_slots if has_adapters else None,
            group_tables=[group.block_tables for group in self._groups],
            group_slots=[group.slot_mapping for group in self._groups],
        )

    def writable(self) -> InputBuffers:
        """Buffers for the core to fill: at any time, as no device reads them."""
        return self._core

    def arrays(self, sizes: StepSizes) -> StepArrays:
        """The used part of the arrays, as views."""
        num_rows, num_tokens, num_blocks = (
            sizes.num_rows,
            sizes.num_batched_tokens,
            sizes.max_num_blocks,
        )
        tables = self._block_tables[: num_rows * num_blocks]
        widths = [1 if kind == "state" else num_blocks for kind in self._kinds]
        groups = (
            GroupBlocks(
                group.block_tables[: num_rows * width].reshape(num_rows, width),
                group.slot_mapping[:num_tokens],
            )
            for group, width in zip(self._groups, widths, strict=True)
        )
        return StepArrays(
            token_ids=self._token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self._slot_mapping[:num_tokens],
            query_start=self.query_start[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            block_tables=tables.reshape(num_rows, num_blocks),
            sample_index=self._sample_index[: sizes.num_samples],
            adapter_slots=self._adapter_slots[:num_rows],
            groups=tuple(groups),
        )

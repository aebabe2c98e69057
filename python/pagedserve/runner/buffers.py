"""Step buffers, allocated once for the largest step and filled in place by the core.

Owns the memory: one buffer of bytes on the host, and on a GPU another with the same layout.  The
core writes the host's arrays, the model reads the device's; on the CPU they are the same memory.

The block tables come last, because they are the largest by far and mostly unused: a step is copied
to a GPU as one range, from the start to the end of its tables, plus another if layers with a window
or chunks have separate tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve._core import InputBuffers, KVGroup
from pagedserve.attention.cross import CrossStep
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout, DeviceRows
from pagedserve.device import Cuda
from pagedserve.models.adapters import AdapterRows, SortedRows
from pagedserve.models.forward import StepImages

# Alignment of every array in the buffers: whole cache lines, and the access size of a GPU.
_ALIGNMENT: Final = 128


@dataclass(frozen=True, slots=True)
class InputArrays:
    """The arrays of a step as views of one buffer of bytes, in the order of their offsets.

    Attributes:
        query_start: int32 ``[max_num_rows + 1]``.
        seq_lens: int32 ``[max_num_rows]``.
        sample_index: int32 ``[max_num_samples]``.
        adapter_slots: int32 ``[max_num_rows]``.
        sample_starts: int32 ``[num_adapter_slots + 1]``, with its order the samples sorted by the
            slots of their adapters, as in `SortedRows`.
        sample_order: int32 ``[max_num_samples]``.
        token_starts: likewise for tokens.
        token_order: int32 ``[max_num_tokens]``.
        token_ids: int32 ``[max_num_tokens]``.
        positions: int64 ``[max_num_tokens]``.
        slot_mapping: int64 ``[max_num_tokens]``.
        window_slots: likewise for sliding-window layers with separate blocks; or empty.
        block_tables: int32 ``[max_num_rows * max_blocks_per_row]``, used as ``[R, B]``.
        window_tables: likewise for those layers; or empty.
    """

    query_start: Tensor
    seq_lens: Tensor
    sample_index: Tensor
    adapter_slots: Tensor
    sample_starts: Tensor
    sample_order: Tensor
    token_starts: Tensor
    token_order: Tensor
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    window_slots: Tensor
    block_tables: Tensor
    window_tables: Tensor

    @classmethod
    def of(cls, buffer: Tensor, lengths: dict[str, int]) -> Self:
        """Split a buffer, uint8 ``[buffer_bytes(lengths)]``, into arrays of these lengths."""
        arrays, offset = {}, 0
        for name, length in lengths.items():
            dtype = DTYPES[name]
            arrays[name] = buffer[offset : offset + length * dtype.itemsize].view(dtype)
            offset += _aligned(length * dtype.itemsize)
        return cls(**arrays)


DTYPES: Final = {array.name: torch.int32 for array in fields(InputArrays)} | {
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    "window_slots": torch.int64,
}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def buffer_bytes(lengths: dict[str, int]) -> int:
    """Bytes of a buffer for arrays of these lengths."""
    return sum(_aligned(length * DTYPES[name].itemsize) for name, length in lengths.items())


def adapter_lengths(num_slots: int, max_num_samples: int, max_num_tokens: int) -> dict[str, int]:
    """Lengths of the arrays that map rows to adapters; a step without adapters copies none."""
    if num_slots == 0:
        return dict.fromkeys(("sample_starts", "sample_order", "token_starts", "token_order"), 0)
    return {
        "sample_starts": num_slots + 1,
        "sample_order": max_num_samples,
        "token_starts": num_slots + 1,
        "token_order": max_num_tokens,
    }


def adapter_rows(arrays: InputArrays) -> dict[str, SortedRows]:
    """The adapter arrays by kind."""
    return {
        "sample": SortedRows(arrays.sample_starts, arrays.sample_order),
        "token": SortedRows(arrays.token_starts, arrays.token_order),
    }


class BatchSizes(Protocol):
    """Sizes of a step, of ``pagedserve._core.SchedulerOutputs``."""

    @property
    def num_rows(self) -> int:
        """Rows, R."""

    @property
    def num_batched_tokens(self) -> int:
        """Tokens, T."""

    @property
    def num_samples(self) -> int:
        """Sampled positions, S."""

    @property
    def max_num_blocks(self) -> int:
        """Entries of a row of the block tables, B."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the model in one step, on its device.

    Attributes:
        token_ids: int32 ``[1, T]``.
        positions: int64 ``[1, T]``.
        sample_index: int32 ``[S]`` positions in T that need logits.
        metadata: step for the attention calls.
        window_metadata: step for calls of layers with a window or chunks and separate blocks.
        images: image features of the step's tokens, or 3D positions; None for text only.
        cross: inputs of cross-attention; None for decoder-only models.
    """

    token_ids: Tensor
    positions: Tensor
    sample_index: Tensor
    metadata: AttentionMetadata
    window_metadata: AttentionMetadata | None = None
    images: StepImages | None = None
    cross: CrossStep | None = None


class StepMemory(Protocol):
    """Host memory shared with other ranks."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate uint8 ``[num_bytes]``, zeroed."""

    def wait_until_read(self) -> None:
        """Wait until the other ranks have read the previous step."""


class StepBuffers:
    """Arrays for the largest step of the scheduler."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_rows: int,
        max_blocks_per_row: int,
        max_num_samples: int | None = None,
        has_adapters: bool = False,
        num_adapter_slots: int = 0,
        groups: Sequence[KVGroup] = (),
        max_cross_blocks: int = 0,
        memory: StepMemory | None = None,
        cuda: Cuda | None = None,
    ) -> None:
        """Allocate the arrays.

        Args:
            max_num_tokens: maximum tokens of a step.
            max_num_rows: maximum rows of a step.
            max_blocks_per_row: maximum length of a block table.
            max_num_samples: maximum sampled tokens of a step; None is one per row.
            has_adapters: whether rows may have adapters; else the core has no slots to write.
            num_adapter_slots: slots of adapters for GPU kernels; 0 without such kernels.
            groups: KV groups of the scheduler beside the first, one of a kind; windows or chunks,
                not both.
            max_cross_blocks: maximum length of a table of an encoder's keys; 0 for decoder-only
                models.
            memory: memory that the core writes to; None is private memory.
            cuda: GPU of the model, for which the core's buffer is pinned; None if the model reads
                that buffer directly.
        """
        self.max_blocks_per_row = max_blocks_per_row
        kinds = {group.kind for group in groups}
        self.has_windows = has_windows = not kinds.isdisjoint(("window", "chunked"))
        max_num_samples = max(max_num_rows, max_num_samples or 0)
        lengths = dict.fromkeys(DTYPES, max_num_rows) | {
            "query_start": max_num_rows + 1,
            "sample_index": max_num_samples,
            "token_ids": max_num_tokens,
            "positions": max_num_tokens,
            "slot_mapping": max_num_tokens,
            "window_slots": max_num_tokens * has_windows,
            "block_tables": max_num_rows * max_blocks_per_row,
            "window_tables": max_num_rows * max_blocks_per_row * has_windows,
            **adapter_lengths(num_adapter_slots, max_num_samples, max_num_tokens),
        }
        num_bytes = buffer_bytes(lengths)
        self._cuda = cuda
        self._memory = memory
        self._host = self._there = _host_bytes(num_bytes, memory, cuda)
        if cuda is not None:
            self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=cuda.device)
            self._copied = cuda.event()
        self.on_device = InputArrays.of(self._there, lengths)
        host = InputArrays.of(self._host, lengths)
        self._num_adapter_slots = num_adapter_slots
        self._host_rows = adapter_rows(host)
        self._device_rows = adapter_rows(self.on_device)
        self._tables_start, self._windows_start = (
            int(tables.storage_offset()) * tables.itemsize
            for tables in (host.block_tables, host.window_tables)
        )
        self._token_ids: NDArray[np.int32] = host.token_ids.numpy()
        self.positions: NDArray[np.int64] = host.positions.numpy()
        self._slot_mapping: NDArray[np.int64] = host.slot_mapping.numpy()
        self.query_start: NDArray[np.int32] = host.query_start.numpy()
        self._seq_lens: NDArray[np.int32] = host.seq_lens.numpy()
        self._block_tables: NDArray[np.int32] = host.block_tables.numpy()
        self._window_slots: NDArray[np.int64] = host.window_slots.numpy()
        self._window_tables: NDArray[np.int32] = host.window_tables.numpy()
        self.adapter_slots: NDArray[np.int32] = host.adapter_slots.numpy()
        self.sample_index: NDArray[np.int32] = host.sample_index.numpy()
        self.sample_rows: NDArray[np.int32] = np.zeros(max_num_samples, dtype=np.int32)
        self.row_handles: NDArray[np.int64] = np.zeros(max_num_rows, dtype=np.int64)
        self.state_slots: NDArray[np.int32] = np.zeros(max_num_rows, dtype=np.int32)
        self._cross_lens: NDArray[np.int32] = np.zeros(max_num_rows, dtype=np.int32)
        self._cross_tables: NDArray[np.int32] = np.zeros(max_num_rows * max_cross_blocks, np.int32)
        tables = {
            "window": self._window_tables,
            "chunked": self._window_tables,
            "state": self.state_slots,
            "cross": self._cross_tables,
        }
        self._core = InputBuffers(
            token_ids=self._token_ids,
            positions=self.positions,
            slot_mapping=self._slot_mapping,
            query_start=self.query_start,
            seq_lens=self._seq_lens,
            block_tables=self._block_tables,
            sample_index=self.sample_index,
            sample_rows=self.sample_rows,
            row_handles=self.row_handles,
            adapter_slots=self.adapter_slots if has_adapters else None,
            cross_lens=self._cross_lens if "cross" in kinds else None,
            group_tables=[tables[group.kind] for group in groups],
            group_slots=[
                self._window_slots if group.window is not None else np.zeros(0, np.int64)
                for group in groups
            ],
        )

    def writable(self) -> InputBuffers:
        """Buffers for the core to fill; waits until the device has copied the previous step."""
        if self._cuda is not None:
            self._copied.synchronize()
        if self._memory is not None:
            self._memory.wait_until_read()
        return self._core

    def adapter_rows(
        self, slots: NDArray[np.int32], kind: Literal["token", "sample"]
    ) -> AdapterRows:
        """Sort tokens or samples of the step by the slots of their adapters.

        The buffers must be `writable`.  Kernels can read the result once the step is uploaded.

        Args:
            slots: adapter slot of each, -1 for none.
            kind: tokens or samples.
        """
        host, there = self._host_rows[kind], self._device_rows[kind]
        if not 0 < len(slots) <= len(host.order) or self._num_adapter_slots == 0:
            return AdapterRows(slots, self.device)
        rows = AdapterRows(slots, self.device, SortedRows(there.starts, there.order[: len(slots)]))
        host.starts.numpy()[:] = rows.starts_of(self._num_adapter_slots)
        host.order.numpy()[: len(rows.order)] = rows.order
        return rows

    def to_device(self, host: Tensor) -> Tensor:
        """Copy a host tensor to the device of the model."""
        return host if self._cuda is None else self._cuda.to_device(host)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._there.device

    def inputs(
        self, sizes: BatchSizes, block_size: int, previous_tokens: Tensor | None = None
    ) -> StepInputs:
        """The used part of the buffers, after the core has filled them.

        These are views: valid until the next step is prepared.

        Args:
            sizes: sizes of the step.
            block_size: tokens per block.
            previous_tokens: int32 ``[S']``, tokens that inputs refer to; see `upload`.
        """
        self.upload(sizes, previous_tokens)
        arrays, num_tokens = self.on_device, sizes.num_batched_tokens
        return StepInputs(
            token_ids=arrays.token_ids[None, :num_tokens],
            positions=arrays.positions[None, :num_tokens],
            sample_index=arrays.sample_index[: sizes.num_samples],
            metadata=self._metadata(sizes, block_size),
            window_metadata=self._window_metadata(sizes, block_size),
        )

    def pad(self, sizes: BatchSizes, num_rows: int) -> None:
        """Append padding rows of one token to a decode step.

        The buffers must be `writable`.

        Args:
            sizes: sizes of the step, which has one token in each row.
            num_rows: rows including padding; padding rows have no query, no key and no slot.
        """
        padding = slice(sizes.num_rows, num_rows)
        self._token_ids[padding] = 0
        self.positions[padding] = 0
        self._slot_mapping[padding] = -1
        self._window_slots[padding] = -1
        self._seq_lens[padding] = 0
        self.adapter_slots[padding] = -1
        self.query_start[sizes.num_rows : num_rows + 1] = sizes.num_rows

    def upload(self, sizes: BatchSizes, previous_tokens: Tensor | None = None) -> None:
        """Copy the step to the device as one range; does nothing on the CPU.

        Args:
            sizes: sizes of the step.
            previous_tokens: int32 ``[S']`` on the device, tokens of the previous step: they replace
                inputs -1, -2 and so on.
        """
        if self._cuda is not None:
            for used in self.used(sizes):
                self._cuda.copy(self._host[used], self._there[used])
            self._copied.record()
        if previous_tokens is not None:
            _complete(self.on_device.token_ids[: sizes.num_batched_tokens], previous_tokens)

    def used(self, sizes: BatchSizes) -> list[slice]:
        """Byte ranges that a step uses."""
        num_bytes = sizes.num_rows * sizes.max_num_blocks * self._block_tables.itemsize
        pieces = [slice(0, self._tables_start + num_bytes)]
        if self.has_windows:
            pieces.append(slice(self._windows_start, self._windows_start + num_bytes))
        return pieces

    def complete(self, sizes: BatchSizes, previous_tokens: Tensor) -> None:
        """Replace references to the previous step's tokens in the host buffer; waits for them.

        Args:
            sizes: sizes of the step.
            previous_tokens: see `upload`, which then does not need them.
        """
        ids = torch.from_numpy(self._token_ids[: sizes.num_batched_tokens])
        _complete(ids, previous_tokens.cpu())

    def layout(self, sizes: BatchSizes, block_size: int) -> BatchLayout:
        """Layout of the step's rows, in host memory."""
        return self._layout(sizes, block_size, self._block_tables)

    def window_layout(self, sizes: BatchSizes, block_size: int) -> BatchLayout:
        """The same rows over the blocks of layers with a window or chunks."""
        return self._layout(sizes, block_size, self._window_tables)

    def _layout(self, sizes: BatchSizes, block_size: int, tables: NDArray[np.int32]) -> BatchLayout:
        num_rows, num_blocks = sizes.num_rows, sizes.max_num_blocks
        tables = tables[: num_rows * num_blocks].reshape(num_rows, num_blocks)
        return BatchLayout(
            query_start=self.query_start[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            block_tables=tables,
            block_size=block_size,
            state_slots=self.state_slots[:num_rows],
        )

    def cross_tables(
        self, num_rows: int, num_blocks: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """State counts of each row's encoder, ``[R]``, and block tables of their keys, ``[R, C]``.

        Args:
            num_rows: R, rows of the step.
            num_blocks: C, length of its longest table.
        """
        tables = self._cross_tables[: num_rows * num_blocks].reshape(num_rows, num_blocks)
        return self._cross_lens[:num_rows], tables

    def _metadata(self, sizes: BatchSizes, block_size: int) -> AttentionMetadata:
        """The step for the attention calls."""
        slots, tables = self.on_device.slot_mapping, self.on_device.block_tables
        return self._over(self.layout(sizes, block_size), slots, tables)

    def _window_metadata(self, sizes: BatchSizes, block_size: int) -> AttentionMetadata | None:
        """The same for layers with a window or chunks, if they have separate blocks."""
        if not self.has_windows:
            return None
        slots, tables = self.on_device.window_slots, self.on_device.window_tables
        return self._over(self.window_layout(sizes, block_size), slots, tables)

    def _over(self, layout: BatchLayout, slots: Tensor, tables: Tensor) -> AttentionMetadata:
        """Rows over blocks, whose slots and tables are on the device."""
        num_rows = len(layout.seq_lens)
        slots = slots[: int(layout.query_start[-1])]
        if self._cuda is None:
            return AttentionMetadata(layout, slots)
        rows = DeviceRows(
            query_start=self.on_device.query_start[: num_rows + 1],
            seq_lens=self.on_device.seq_lens[:num_rows],
            block_tables=tables[: layout.block_tables.size].view(layout.block_tables.shape),
            max_query_len=layout.max_query_len,
            max_seq_len=layout.max_seq_len,
        )
        return AttentionMetadata(layout, slots, rows)


def _complete(ids: Tensor, previous_tokens: Tensor) -> None:
    """Replace inputs -1, -2 and so on by those tokens."""
    known = previous_tokens[(-1 - ids).clamp_(min=0)]
    torch.where(ids < 0, known, ids, out=ids)


def _host_bytes(num_bytes: int, memory: StepMemory | None, cuda: Cuda | None) -> Tensor:
    """Allocate zeroed host memory, pinned if a device copies from it."""
    if memory is not None:
        shared = memory.allocate(num_bytes)
        return shared if cuda is None else cuda.pin(shared)
    if cuda is not None:
        return cuda.pinned(num_bytes, dtype=torch.uint8).zero_()
    return torch.zeros(num_bytes, dtype=torch.uint8)

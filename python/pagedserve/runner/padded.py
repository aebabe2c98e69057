"""Decode steps padded to one of a few sizes, at fixed addresses.

A CUDA graph replays one shape over fixed memory.  So a step of R rows with one token each is padded
to the next size, and every input has the same address in each step of that size: the arrays of the
step buffers do already, and the block tables, whose rows are as long as the step's longest, are
copied here to rows of full length.

Invariants:

1. A padding row has no query and no key, and its token no slot, so nothing of it is written or
   attended to.
2. The result of a step of one size does not depend on earlier contents of padding rows.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from pagedserve.attention.metadata import AttentionMetadata, DeviceRows
from pagedserve.models.adapters import StepAdapters
from pagedserve.runner.buffers import BatchSizes, StepBuffers, StepInputs
from pagedserve.runner.model_runner import Forward

# Larger steps are bound by their kernels, not by launches.
_MAX_ROWS: Final = 256


def ladder(max_num_rows: int) -> tuple[int, ...]:
    """Sizes to pad to, ascending: 1, 2, 4, then multiples of 8, up to the maximum rows of a step.

    The last is ``max_num_rows`` itself, or 256 if that is less.
    """
    most = min(max_num_rows, _MAX_ROWS)
    return (*(size for size in (1, 2, 4, *range(8, most, 8)) if size < most), most)


def _spread(tables: Tensor, rows: Tensor, step: BatchSizes) -> None:
    """Copy a step's contiguous tables to rows of full length."""
    num_rows, num_blocks = step.num_rows, step.max_num_blocks
    packed = tables[: num_rows * num_blocks].view(num_rows, num_blocks)
    rows[:num_rows, :num_blocks].copy_(packed)


class PaddedDecode:
    """Runs decode steps at padded sizes, kernel by kernel."""

    def __init__(
        self,
        forward: Forward,
        buffers: StepBuffers,
        *,
        sizes: Sequence[int],
        block_size: int,
    ) -> None:
        """Allocate the block tables.

        Args:
            forward: forward pass of the model.
            buffers: buffers that the core fills.
            sizes: numbers of rows, ascending.
            block_size: tokens per block.
        """
        self.sizes = tuple(sizes)
        self._forward = forward
        self._buffers = buffers
        self._block_size = block_size
        shape = self.sizes[-1], buffers.max_blocks_per_row
        self._tables = torch.zeros(shape, dtype=torch.int32, device=buffers.device)
        self._window_tables = torch.zeros_like(self._tables[:, : shape[1] * buffers.has_windows])

    def fits(self, step: BatchSizes) -> bool:
        """Whether every row of a step has one token and one sample, within the largest size."""
        is_decode = step.num_rows == step.num_batched_tokens == step.num_samples
        return is_decode and 0 < step.num_rows <= self.sizes[-1]

    def run(
        self, step: BatchSizes, previous_tokens: Tensor | None = None, *, is_adapted: bool = False
    ) -> Tensor:
        """Logits, float32 ``[R, V]``, of a supported step; valid until the next step.

        Args:
            step: sizes of the step.
            previous_tokens: int32 ``[S']``, tokens that inputs refer to; see `StepBuffers.upload`.
            is_adapted: whether a row has an adapter.
        """
        size = self.sizes[bisect_left(self.sizes, step.num_rows)]
        adapters = self._fill(step, size, previous_tokens, is_adapted=is_adapted)
        return self._logits(step, size, adapters)[: step.num_rows]

    def _fill(
        self,
        step: BatchSizes,
        size: int,
        previous_tokens: Tensor | None = None,
        *,
        is_adapted: bool,
    ) -> StepAdapters | None:
        """Pad the step in the buffers to ``size`` rows, and upload it.

        Returns:
            The rows of each adapter, at fixed addresses; None without adapters.
        """
        self._buffers.pad(step, size)
        adapters = None
        if is_adapted:
            rows = self._buffers.adapter_rows(self._buffers.adapter_slots[:size], "token")
            adapters = StepAdapters(rows, rows)  # every row samples
        self._buffers.upload(step, previous_tokens)
        arrays = self._buffers.on_device
        _spread(arrays.block_tables, self._tables, step)
        if self._buffers.has_windows:
            _spread(arrays.window_tables, self._window_tables, step)
        return adapters

    def _inputs(self, step: BatchSizes, size: int) -> StepInputs:
        """Inputs of a size, at fixed addresses."""
        buffers, arrays = self._buffers, self._buffers.on_device
        rows = DeviceRows(
            query_start=arrays.query_start[: size + 1],
            seq_lens=arrays.seq_lens[:size],
            block_tables=self._tables[:size],
            max_query_len=1,
            max_seq_len=self._tables.shape[1] * self._block_size,
        )
        layout = buffers.layout(step, self._block_size)
        windows = None
        if buffers.has_windows:
            windows = AttentionMetadata(
                buffers.window_layout(step, self._block_size),
                arrays.window_slots[:size],
                replace(rows, block_tables=self._window_tables[:size]),
            )
        return StepInputs(
            token_ids=arrays.token_ids[None, :size],
            positions=arrays.positions[None, :size],
            sample_index=arrays.sample_index[:size],
            metadata=AttentionMetadata(layout, arrays.slot_mapping[:size], rows),
            window_metadata=windows,
        )

    def _logits(self, step: BatchSizes, size: int, adapters: StepAdapters | None) -> Tensor:
        """Logits, float32 ``[size, V]``, of the uploaded step."""
        return self._run(self._inputs(step, size), adapters)

    def _run(self, inputs: StepInputs, adapters: StepAdapters | None) -> Tensor:
        return self._forward(inputs, adapters=adapters).float()

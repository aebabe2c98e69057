"""The arrays of a step, allocated once for the largest step and filled in place by the core.

Owns the memory.  Each array is a torch tensor and a numpy view of the same bytes; the core
writes the view, the model reads the tensor.  Only the used part of an array is ever read, or
copied to a device.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve import _core
from pagedserve.attention.buckets import StepLayout
from pagedserve.attention.metadata import AttentionMetadata


class StepSizes(Protocol):
    """How much of the buffers a step uses; of ``pagedserve._core.SchedulerOutputs``."""

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
    """What the model is given in one step, on its device.

    Attributes:
        token_ids: int32 ``[1, T]``.
        positions: int64 ``[1, T]``.
        sample_index: int32 ``[S]`` positions in T whose logits are wanted.
        metadata: for the attention calls.
    """

    token_ids: Tensor
    positions: Tensor
    sample_index: Tensor
    metadata: AttentionMetadata


class StepBuffers:
    """Arrays for the largest step that the scheduler may make."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_rows: int,
        max_blocks_per_row: int,
        device: torch.device,
    ) -> None:
        """Allocate.

        Args:
            max_num_tokens: most tokens of a step.
            max_num_rows: most rows of a step.
            max_blocks_per_row: longest block table.
            device: the model's; the buffers are in host memory, pinned for a GPU.
        """
        self._device = device
        pinned = device.type == "cuda"

        def array(length: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(length, dtype=dtype, pin_memory=pinned)

        self._token_ids = array(max_num_tokens, torch.int32)
        self._positions = array(max_num_tokens, torch.int64)
        self._slot_mapping = array(max_num_tokens, torch.int64)
        self._sample_index = array(max_num_rows, torch.int32)
        self.query_start: NDArray[np.int32] = np.zeros(max_num_rows + 1, dtype=np.int32)
        self._seq_lens: NDArray[np.int32] = np.zeros(max_num_rows, dtype=np.int32)
        self._block_tables: NDArray[np.int32] = np.zeros(
            max_num_rows * max_blocks_per_row, dtype=np.int32
        )
        self.positions: NDArray[np.int64] = self._positions.numpy()
        self.sample_rows: NDArray[np.int32] = np.zeros(max_num_rows, dtype=np.int32)
        self.row_handles: NDArray[np.int64] = np.zeros(max_num_rows, dtype=np.int64)
        self.core = _core.InputBuffers(
            token_ids=self._token_ids.numpy(),
            positions=self.positions,
            slot_mapping=self._slot_mapping.numpy(),
            query_start=self.query_start,
            seq_lens=self._seq_lens,
            block_tables=self._block_tables,
            sample_index=self._sample_index.numpy(),
            sample_rows=self.sample_rows,
            row_handles=self.row_handles,
        )

    def inputs(self, sizes: StepSizes, block_size: int) -> StepInputs:
        """The used part of the buffers, after the core has filled them.

        On the CPU these are views: valid until the next step is prepared.

        Args:
            sizes: of the step.
            block_size: tokens of a block.
        """
        num_tokens = sizes.num_batched_tokens
        return StepInputs(
            token_ids=self._on_device(self._token_ids[None, :num_tokens]),
            positions=self._on_device(self._positions[None, :num_tokens]),
            sample_index=self._on_device(self._sample_index[: sizes.num_samples]),
            metadata=self.metadata(sizes, block_size),
        )

    def metadata(self, sizes: StepSizes, block_size: int) -> AttentionMetadata:
        """The step as the attention calls read it."""
        num_rows, num_blocks = sizes.num_rows, sizes.max_num_blocks
        tables = self._block_tables[: num_rows * num_blocks].reshape(num_rows, num_blocks)
        layout = StepLayout(
            query_start=self.query_start[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            block_tables=tables,
            block_size=block_size,
        )
        slots = self._on_device(self._slot_mapping[: sizes.num_batched_tokens])
        return AttentionMetadata(layout, slots)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

"""The arrays of a step as views of one buffer of bytes."""

from dataclasses import dataclass, fields
from typing import Final, Self

import torch
from torch import Tensor

from pagedserve.models.adapters import SortedRows

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

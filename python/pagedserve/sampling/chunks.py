"""Rows of a step's logits, selected and split into chunks whose copies stay small."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.device import Cuda, to_device

# Maximum elements of an intermediate array.  On a CPU a few arrays of it (2 MB each) stay in the
# cache; on other devices fewer, larger operations are faster.
_MAX_ELEMENTS_CPU = 1 << 19
_MAX_ELEMENTS = 1 << 22


def rows_per_chunk(logits: Tensor) -> int:
    """Number of rows of logits ``[N, V]`` per chunk."""
    most = _MAX_ELEMENTS_CPU if logits.device.type == "cpu" else _MAX_ELEMENTS
    return max(1, most // logits.shape[1])


def in_chunks(
    rows: Sequence[int] | NDArray[np.int64], logits: Tensor
) -> Iterator[NDArray[np.int64]]:
    """Split row indices into chunks."""
    size = rows_per_chunk(logits)
    for start in range(0, len(rows), size):
        yield np.asarray(rows[start : start + size])


def select_rows(values: Tensor, index: NDArray[np.int64], cuda: Cuda | None) -> Tensor:
    """Select rows in ascending order: a view if they are contiguous."""
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return values[first : last + 1]
    return copy_rows(values, index, cuda)


def copy_rows(values: Tensor, index: NDArray[np.int64], cuda: Cuda | None) -> Tensor:
    """Copy rows."""
    return values.index_select(0, to_device(torch.from_numpy(index), cuda))

"""Rows of a step's logits, selected and split into chunks whose copies stay small."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pagedserve.sampling.ops import Array, SamplingOps


def in_chunks(
    rows: Sequence[int] | NDArray[np.int64], vocab_size: int, ops: SamplingOps
) -> Iterator[NDArray[np.int64]]:
    """Split row indices into chunks of at most ``ops.max_elements`` logits."""
    size = max(1, ops.max_elements // vocab_size)
    for start in range(0, len(rows), size):
        yield np.asarray(rows[start : start + size])


def select_rows(values: Array, index: NDArray[np.int64], ops: SamplingOps) -> Array:
    """Select rows in ascending order: a view if they are contiguous."""
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return values[first : last + 1]
    return ops.copy_rows(values, index)

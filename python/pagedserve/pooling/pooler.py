"""Pooling of hidden states to one vector per row."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedserve.pooling.rules import PoolingType

# A numpy array, or a tensor of torch.
Array: TypeAlias = Any

_FIRST, _LAST = 0, -1


def pool_rows(
    states: Array, query_start: NDArray[np.int32], pooling_type: PoolingType
) -> list[Array]:
    """Pool each row to one vector ``[F]``.

    Args:
        states: float32 ``[T, F]``.
        query_start: int32 ``[R + 1]``; each row is a whole prompt.
        pooling_type: see `PoolingRules`.
    """
    rows = [states[start:end] for start, end in pairwise(query_start.tolist())]
    if pooling_type == "MEAN":
        return [row.mean(0) for row in rows]
    place = _FIRST if pooling_type == "CLS" else _LAST
    return [row[place] for row in rows]


def token_types(
    query_start: NDArray[np.int32], rows: NDArray[np.int32], pair_starts: Sequence[int | None]
) -> NDArray[np.int64] | None:
    """Segments of tokens: 0 for a first text and 1 for a second, int64 ``[T]``; None if all are 0.

    Args:
        query_start: int32 ``[R + 1]``; each row is a whole prompt.
        rows: int32 ``[S]``, row of each prompt.
        pair_starts: start of the second text of each prompt.
    """
    if all(start is None for start in pair_starts):
        return None
    types = np.zeros(query_start[-1], np.int64)
    for row, start in zip(rows, pair_starts, strict=True):
        if start is not None:
            types[query_start[row] + start : query_start[row + 1]] = 1
    return types

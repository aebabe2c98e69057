"""Pooling of hidden states to one vector per row."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.pooling.rules import PoolingType

_FIRST, _LAST = 0, -1


def pool_rows(states: Tensor, query_start: NDArray[np.int32], pooling_type: PoolingType) -> Tensor:
    """Pool each row to one vector, float32 ``[R, F]``.

    Args:
        states: ``[T, F]``.
        query_start: int32 ``[R + 1]``; each row is a whole prompt.
        pooling_type: see `PoolingRules`.
    """
    rows = states.float().split(np.diff(query_start).tolist())
    if pooling_type == "MEAN":
        return torch.stack([row.mean(dim=0) for row in rows])
    place = _FIRST if pooling_type == "CLS" else _LAST
    return torch.stack([row[place] for row in rows])


def token_types(
    query_start: NDArray[np.int32], rows: NDArray[np.int32], pair_starts: Sequence[int | None]
) -> Tensor | None:
    """Segments of tokens: 0 for a first text and 1 for a second, int64 ``[T]``; None if all are 0.

    Args:
        query_start: int32 ``[R + 1]``; each row is a whole prompt.
        rows: int32 ``[S]``, row of each prompt.
        pair_starts: start of the second text of each prompt.
    """
    if all(start is None for start in pair_starts):
        return None
    types = torch.zeros(int(query_start[-1]), dtype=torch.long)
    for row, start in zip(rows, pair_starts, strict=True):
        if start is not None:
            types[query_start[row] + start : query_start[row + 1]] = 1
    return types

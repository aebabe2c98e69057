"""States of tokens to one vector a row."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.pooling.rules import PoolingType

_FIRST, _LAST = 0, -1


def pool_rows(states: Tensor, query_start: NDArray[np.int32], pooling_type: PoolingType) -> Tensor:
    """One vector a row, float32 ``[R, F]``.

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

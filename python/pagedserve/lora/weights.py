"""LoRA weights of one module."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class LoraWeights(NamedTuple):
    """Low-rank update ``b @ a`` of rank r, added to weights ``[N, K]``.

    Attributes:
        a: float32 ``[r, K]``.
        b: float32 ``[N, r]``, already scaled.
    """

    a: NDArray[np.float32]
    b: NDArray[np.float32]

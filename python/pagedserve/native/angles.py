"""Rotary angles of a step in the dtype of a model."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedserve.models.rotary import half_angles
from pagedserve.native.numbers import ComputeDtype, narrow


@dataclass(frozen=True, slots=True)
class Angles:
    """Rotary angles of a step's tokens in the model's dtype, ``[T, head_size]`` each."""

    cosines: NDArray[np.generic]
    sines: NDArray[np.generic]

    @classmethod
    def of(
        cls,
        frequencies: NDArray[np.float32],
        positions: NDArray[np.int64],
        dtype: ComputeDtype,
    ) -> "Angles":
        """Compute the angles of positions ``[T]``."""
        return cls(*(_doubled(half, dtype) for half in half_angles(frequencies, positions)))


def _doubled(half: NDArray[np.float32], dtype: ComputeDtype) -> NDArray[np.generic]:
    """Round to a dtype, once for each half of a head."""
    numbers = narrow(half, dtype)
    return np.concatenate((numbers, numbers), axis=1)

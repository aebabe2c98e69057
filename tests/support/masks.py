"""Masks of tokens as the sampler takes them, packed by numpy."""

import numpy as np
from numpy.typing import NDArray


def packed(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Bits of a boolean array ``[N, V]``, int32 ``[N, ceil(V / 32)]``."""
    bits = np.packbits(allowed, axis=1, bitorder="little")
    missing = -bits.shape[1] % 4
    return np.pad(bits, ((0, 0), (0, missing))).view(np.int32)

"""Weights in the blocks of GGUF files: 32 consecutive numbers of a row, with a scale."""

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import round_to_blocks
from pagedserve.native.stored import STORAGES

# Largest scale.
LARGEST_FLOAT16: Final = np.float32(np.finfo(np.float16).max)


def rounded_to_blocks(
    weights: NDArray[np.float32], blocks: Literal["Q8_0", "Q4_1"]
) -> NDArray[np.uint8]:
    """Round rows to blocks (rust/cpu/src/rounding.rs).

    Q8_0 are the multiples of a 127th of a block's largest magnitude, as llama.cpp rounds.  Q4_1 are
    16 levels from a block's minimum, with the least squared error that is found: levels over the
    whole range and over shares of it are tried, and for each of them the step and the minimum that
    fit its levels best.  The first are llama.cpp's, so no block is worse than its.

    Args:
        weights: Float32 ``[N, K]``, K a multiple of 32, magnitudes of at most 65504, of Q8_0 127
            times as many.
        blocks: Their format.

    Returns:
        The bytes of the blocks, uint8 ``[N, ...]``.
    """
    num_weights, num_bytes = STORAGES[blocks]
    found = np.empty((len(weights), weights.shape[1] // num_weights * num_bytes), np.uint8)
    round_to_blocks(weights.reshape(-1), blocks, found.reshape(-1))
    return found

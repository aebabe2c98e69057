"""Weights in the blocks of GGUF files: 32 consecutive numbers of a row, with a scale.

Costs: some 7 ns per weight for Q8_0 and 70 for Q4_1, on one thread.
"""

from collections.abc import Iterator
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from pagedserve.native.stored import BLOCK_WEIGHTS, BLOCKS

# Largest scale.
LARGEST_FLOAT16: Final = np.float32(np.finfo(np.float16).max)

_MAX_BYTE: Final = np.float32(127)
_MAX_LEVEL: Final = np.float32(15)
# Shares of a block's range over which Q4_1's levels are tried; numbers outside become the nearest.
_SHARES: Final = (1.0, 0.95, 0.9)


def q8_0(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to multiples of a 127th of a block's largest magnitude, as llama.cpp does.

    Args:
        weights: Float32 ``[N, K]``, K a multiple of 32, magnitudes of at most 127 * 65504.

    Returns:
        Blocks of a float16 scale and 32 int8, uint8 ``[N, K // 32 * 34]``.
    """
    blocks = weights.reshape(-1, BLOCK_WEIGHTS)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / _MAX_BYTE
    magnitudes = np.abs(blocks * _inverse(scales))
    whole = np.floor(magnitudes)
    whole += magnitudes - whole >= np.float32(0.5)
    found = np.empty(len(blocks), BLOCKS["Q8_0"])
    found["scale"] = scales[:, 0]
    found["numbers"] = np.copysign(whole, blocks)
    return found.view(np.uint8).reshape(len(weights), -1)


def q4_1(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to 16 levels from a block's minimum, with the least squared error that is found.

    Levels over the whole range and over shares of it are tried, and for each of them the step and
    the minimum that fit its levels best. The first are llama.cpp's, so no block is worse than its.

    Args:
        weights: Float32 ``[N, K]``, K a multiple of 32, magnitudes of at most 65504.

    Returns:
        Blocks of a float16 step and minimum and 32 halves of bytes, uint8 ``[N, K // 32 * 20]``.
    """
    # Sums over a block are quicker down columns.
    blocks = np.ascontiguousarray(weights.reshape(-1, BLOCK_WEIGHTS).T)
    candidates = _candidates(blocks)
    best = next(candidates)
    for candidate in candidates:
        best.improve(candidate)
    found = np.empty(blocks.shape[1], BLOCKS["Q4_1"])
    found["scale"], found["minimum"] = best.step, best.minimum
    first, second = np.split(best.levels.astype(np.uint8), 2)
    found["numbers"] = (first | second << 4).T
    return found.view(np.uint8).reshape(len(weights), -1)


class _Rounding:
    """Blocks rounded to levels.

    Attributes:
        step: Distance of two levels, a float16 in float32 ``[B]``.
        minimum: Lowest level, likewise.
        levels: Number of each weight's level, float32 ``[32, B]``.
        error: Sum of squared errors, float32 ``[B]``.
    """

    def __init__(self, *arrays: NDArray[np.float32]) -> None:
        self.step, self.minimum, self.levels, self.error = self._arrays = arrays

    @classmethod
    def of(
        cls, blocks: NDArray[np.float32], step: NDArray[np.float32], minimum: NDArray[np.float32]
    ) -> Self:
        """Round blocks ``[32, B]`` to the nearest levels of a step and a minimum ``[B]``."""
        step, minimum = _as_float16(step), _as_float16(minimum)
        levels = np.rint((blocks - minimum) * _inverse(step))
        np.clip(levels, 0, _MAX_LEVEL, out=levels)
        error = np.square(levels * step + minimum - blocks).sum(axis=0)
        return cls(step, minimum, levels, error)

    def improve(self, other: Self) -> None:
        """Take the blocks of another rounding whose error is smaller."""
        is_smaller = other.error < self.error
        for ours, theirs in zip(self._arrays, other._arrays, strict=True):
            np.copyto(ours, theirs, where=is_smaller)


def _candidates(blocks: NDArray[np.float32]) -> Iterator[_Rounding]:
    """Roundings of blocks ``[32, B]``, that over their whole range first."""
    low = blocks.min(axis=0)
    widest = (blocks.max(axis=0) - low) / _MAX_LEVEL
    for share in _SHARES:
        step = widest * np.float32(share)
        over_share = _Rounding.of(blocks, step, low + (widest - step) * (_MAX_LEVEL / 2))
        fitted = _fitted(blocks, over_share.levels)
        yield over_share
        yield _Rounding.of(blocks, *fitted)


def _fitted(
    blocks: NDArray[np.float32], levels: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Step and minimum ``[B]`` with the least squared error for given levels."""
    mean_level, mean = (array.mean(axis=0) for array in (levels, blocks))
    deviations = levels - mean_level
    squares = np.square(deviations).sum(axis=0)
    products = (deviations * blocks).sum(axis=0)
    step = products * _inverse(squares)
    return step, mean - step * mean_level


def _as_float16(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest float16, in float32; the largest one for numbers beyond it."""
    clipped = np.clip(numbers, -LARGEST_FLOAT16, LARGEST_FLOAT16)
    return clipped.astype(np.float16).astype(np.float32)


def _inverse(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / x of numbers from 0; 0 where that would be infinite."""
    is_normal = numbers >= np.finfo(np.float32).tiny
    return np.divide(np.float32(1), numbers, out=np.zeros_like(numbers), where=is_normal)

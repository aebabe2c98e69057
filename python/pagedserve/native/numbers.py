"""Numbers of the model's dtype in numpy arrays: float32 as they are, others as their 16 bits."""

from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

ComputeDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]

# What the arrays hold.
STORED: Final[dict[ComputeDtype, type[np.float32 | np.float16 | np.uint16]]] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
}


def itemsize(dtype: ComputeDtype) -> int:
    """Bytes of a number."""
    return np.dtype(STORED[dtype]).itemsize


def empty(shape: tuple[int, ...], dtype: ComputeDtype) -> NDArray[np.generic]:
    """Allocate an array of such numbers."""
    return np.empty(shape, STORED[dtype])


def narrow(numbers: NDArray[np.float32], dtype: ComputeDtype) -> NDArray[np.generic]:
    """Round finite float32 numbers to a dtype, ties to even."""
    if dtype != "bfloat16":
        return numbers.astype(STORED[dtype], copy=False)
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def widen(numbers: NDArray[np.generic], dtype: ComputeDtype) -> NDArray[np.float32]:
    """Convert to float32, which is exact."""
    if dtype != "bfloat16":
        return numbers.astype(np.float32, copy=False)
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: NDArray[np.float32], dtype: ComputeDtype) -> NDArray[np.float32]:
    """The nearest numbers of a dtype, in float32."""
    return widen(narrow(numbers, dtype), dtype)

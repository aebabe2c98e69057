"""The parts of a KV pool: keys, values and, in a pool of bytes, their scales.

A pool is ``[num_blocks, block_size, Hkv, size]``.  Of floats, a row is a key and then a value.  Of
bytes, int8 or float8, ``size`` is ``D + Dv + 4``: a block has the rows of all its slots first,
which keeps them aligned, and then a scale of each key and value, bfloat16 ``[block_size, Hkv, 2]``.
A number is its byte times the scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")


class ByteNumbers(NamedTuple):
    """The numbers of a type of bytes.

    Attributes:
        largest: largest of them.
        mantissa: bits of a float's mantissa; None of integers.
        least_step: distance of the smallest two.
    """

    largest: float
    mantissa: int | None
    least_step: float


NUMBERS = {
    torch.int8: ByteNumbers(127, None, 1),
    torch.float8_e4m3fn: ByteNumbers(448, 3, 2**-9),
    torch.float8_e5m2: ByteNumbers(57344, 2, 2**-16),
}
_SCALE_BYTES = 4


class PoolParts(NamedTuple):
    """Views of a pool.

    Attributes:
        keys: ``[num_blocks, block_size, Hkv, D]``.
        values: ``[num_blocks, block_size, Hkv, Dv]``.
        scales: bfloat16 ``[num_blocks, block_size, Hkv, 2]``, of a key and of a value; None of a
            pool of floats.
    """

    keys: Tensor
    values: Tensor
    scales: Tensor | None


def pool_parts(pool: Tensor, key_size: int) -> PoolParts:
    """Return the parts of a pool.

    Args:
        pool: ``[num_blocks, block_size, Hkv, size]``; of bytes, each block contiguous.
        key_size: elements of a key, D.
    """
    if pool.dtype not in NUMBERS:
        return PoolParts(pool[..., :key_size], pool[..., key_size:], None)
    num_blocks, block_size, num_heads, size = pool.shape
    size -= _SCALE_BYTES
    num_numbers = block_size * num_heads * size
    blocks = pool.view(num_blocks, -1)
    rows = blocks[:, :num_numbers].unflatten(1, (block_size, num_heads, size))
    scales = blocks[:, num_numbers:].view(torch.bfloat16).unflatten(1, (block_size, num_heads, 2))
    return PoolParts(rows[..., :key_size], rows[..., key_size:], scales)

"""``SharedMemory``: collectives over ranks on one machine, through shared memory (Rust).

Invariant: a rank that waits for one that died checks for it instead of hanging.

Costs: some 10 us per chunk, two copies of each byte, and an addition per rank.
"""

import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagedserve._core.cpu import RankExchange
from pagedserve.host_ops.capabilities import DTYPE_NAMES

# Fits in a core's cache beside those of others.
_PIECE_BYTES: Final = 1 << 18
# Seconds after which a waiting rank checks whether the others are alive.
_PATIENCE: Final = 0.1


class SharedMemory:
    """This rank's mapping of the memory."""

    def __init__(self, file: int, rank: int, size: int, check: Callable[[], None]) -> None:
        """Map the memory.

        Args:
            file: Descriptor of the memory, which starts with this data.
            rank: Rank of this process.
            size: Size of the group.
            check: Raises if another rank has died.
        """
        num_bytes = self.num_bytes(size)
        if os.fstat(file).st_size < num_bytes:
            os.ftruncate(file, num_bytes)
        memory = np.frombuffer(mmap.mmap(file, num_bytes), dtype=np.uint8)
        self._memory = memory
        self._size = size
        self._check = check
        self._exchange = RankExchange(
            memory.ctypes.data, rank=rank, num_ranks=size, piece_bytes=_PIECE_BYTES
        )

    @staticmethod
    def num_bytes(size: int) -> int:
        """Bytes of the memory for that many ranks, in whole pages."""
        num_bytes = RankExchange.num_bytes(num_ranks=size, piece_bytes=_PIECE_BYTES)
        return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

    @staticmethod
    def takes(dtype: torch.dtype) -> bool:
        """Whether it supports sums of a dtype."""
        return dtype in DTYPE_NAMES

    def all_reduce(self, values: Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place; see ``RankGroup``."""
        dtype = DTYPE_NAMES[values.dtype]
        self._complete(partial(self._exchange.sum, values.data_ptr(), values.numel(), dtype))

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """The contiguous tensors of all ranks, of the same shape, by rank; see ``RankGroup``."""
        parts = values.new_empty(self._size, *values.shape)
        places = values.data_ptr(), parts.data_ptr()
        self._complete(partial(self._exchange.gather, *places, values.nbytes))
        return list(parts)

    def _complete(self, call: Callable[..., bool]) -> None:
        while not call(patience=_PATIENCE):
            self._check()

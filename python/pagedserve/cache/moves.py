"""Moves of blocks in one pool, as the core decides them and ranks pass them on."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class BlockMoves(Protocol):
    """Moves in one pool, in this order: int64 ``[n, 2]`` each."""

    @property
    def swap_out(self) -> NDArray[np.int64]:
        """(device block, host block)."""

    @property
    def swap_in(self) -> NDArray[np.int64]:
        """(host block, device block)."""

    @property
    def copy(self) -> NDArray[np.int64]:
        """(source, destination), both on the device."""

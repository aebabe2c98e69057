"""Copies of blocks in host memory, all layers in one call."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve._core import cpu


def copy_blocks(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: NDArray[np.int64]
) -> None:
    """Copy blocks of each layer; all sources are read before a destination is written.

    Args:
        sources: source pool of each layer, ``[num_blocks, ...]``, contiguous, on the CPU.
        destinations: likewise, with blocks of the same size; or the sources themselves.
        pairs: ``[n, 2]``, rows of (source, destination); destinations are distinct.

    Raises:
        StepError: a pool does not have a block.
    """
    cpu.copy_blocks(
        layers=[
            (source.data_ptr(), len(source), target.data_ptr(), len(target), source[0].nbytes)
            for source, target in zip(sources, destinations, strict=True)
        ],
        pairs=pairs,
        num_threads=torch.get_num_threads(),
    )

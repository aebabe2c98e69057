"""KV pools of a native model on device and host, which here are both host memory.

Owns the pools.  A block id means the same block in every layer of a KV group.  The kernel defines
the layout of a block (``rust/cpu``); others copy whole blocks only.

Invariant: a block's contents before its first write are undefined.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import copy_blocks
from pagedserve.cache.moves import BlockMoves
from pagedserve.executor.protocol import CacheShape
from pagedserve.host_ops.pages import bytes_in_huge_pages
from pagedserve.native.config import DecoderConfig
from pagedserve.native.numbers import ComputeDtype, itemsize


def layer_block_bytes(config: DecoderConfig, block_size: int, dtype: ComputeDtype) -> int:
    """Bytes of one block of one layer, keys and values."""
    return block_size * config.num_kv_heads * 2 * config.head_size * itemsize(dtype)


def layers_by_group(config: DecoderConfig, window: int | None) -> tuple[list[int], list[int]]:
    """Indices of the layers that keep all keys, and of those with a window of at most this size."""
    split: tuple[list[int], list[int]] = [], []
    for index, layer in enumerate(config.layers):
        is_narrow = window is not None and layer.window is not None and layer.window <= window
        split[is_narrow].append(index)
    return split


@dataclass(frozen=True, slots=True)
class LayerPool:
    """Pool of one layer.

    Attributes:
        memory: Its bytes, which nothing but the kernels reads or writes.
        num_blocks: Blocks.
        block_size: Tokens per block.
        group: Index of its KV group.
    """

    memory: NDArray[np.uint8]
    num_blocks: int
    block_size: int
    group: int

    @property
    def address(self) -> int:
        """Address of the first block."""
        return int(self.memory.ctypes.data)


class KVPools:
    """Pools of all layers, on the device and for swapped sequences.

    Attributes:
        layers: Pool of each layer.
    """

    def __init__(self, config: DecoderConfig, shape: CacheShape, dtype: ComputeDtype) -> None:
        """Allocate; nothing is written, so unused blocks may take no memory yet."""
        self._block_bytes = layer_block_bytes(config, shape.block_size, dtype)
        group = next((group for group in shape.groups if group.kind == "window"), None)
        others, windowed = layers_by_group(config, None if group is None else group.window)
        index = 0 if group is None else 1 + shape.groups.index(group)
        counts = dict.fromkeys(others, (0, shape.num_gpu_blocks, shape.num_cpu_blocks))
        if group is not None:
            counts |= dict.fromkeys(windowed, (index, group.num_gpu_blocks, group.num_cpu_blocks))
        self.layers: list[LayerPool] = []
        self._swapped: list[LayerPool] = []
        for layer in range(len(config.layers)):
            number, num_gpu_blocks, num_cpu_blocks = counts[layer]
            self.layers.append(self._pool(num_gpu_blocks, shape.block_size, number))
            self._swapped.append(self._pool(num_cpu_blocks, shape.block_size, number))

    def _pool(self, num_blocks: int, block_size: int, group: int) -> LayerPool:
        memory = bytes_in_huge_pages(num_blocks * self._block_bytes)
        return LayerPool(memory, num_blocks, block_size, group)

    def move(self, step: Sequence[BlockMoves], num_threads: int) -> None:
        """Execute the moves of a step in each group's pools: swap out, swap in, copy."""
        for group, moves in enumerate(step):
            pools = [pool for pool in self.layers if pool.group == group]
            swapped = [pool for pool in self._swapped if pool.group == group]
            self._copy(pools, swapped, moves.swap_out, num_threads)
            self._copy(swapped, pools, moves.swap_in, num_threads)
            self._copy(pools, pools, moves.copy, num_threads)

    def _copy(
        self,
        sources: Sequence[LayerPool],
        targets: Sequence[LayerPool],
        pairs: NDArray[np.int64],
        num_threads: int,
    ) -> None:
        if pairs.size == 0:
            return
        copy_blocks(
            layers=[
                (
                    source.address,
                    source.num_blocks,
                    target.address,
                    target.num_blocks,
                    self._block_bytes,
                )
                for source, target in zip(sources, targets, strict=True)
            ],
            pairs=pairs,
            num_threads=num_threads,
        )


def window_group_of(config: DecoderConfig) -> int | None:
    """Widest sliding window of the layers; None if none has one."""
    windows = (layer.window for layer in config.layers if layer.window is not None)
    return max(windows, default=None)

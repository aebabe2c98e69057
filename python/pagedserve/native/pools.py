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
from pagedserve.cache.layers import BYTES_FORMAT, KVFormat, kv_bytes_per_block
from pagedserve.cache.moves import BlockMoves
from pagedserve.config.cache import KVCacheDtype
from pagedserve.executor.protocol import CacheShape
from pagedserve.host_ops.pages import bytes_in_huge_pages
from pagedserve.native.config import DecoderConfig
from pagedserve.native.numbers import ComputeDtype, itemsize


@dataclass(frozen=True, slots=True)
class LayerPool:
    """Pool of one layer.

    Attributes:
        memory: Its bytes, which nothing but the kernels reads or writes.
        address: Address of the first block.
        num_blocks: Blocks.
        block_size: Tokens per block.
        group: Index of its KV group.
        cache_dtype: Storage type of keys and values.
    """

    memory: NDArray[np.uint8]
    address: int
    num_blocks: int
    block_size: int
    group: int
    cache_dtype: KVCacheDtype


def kv_format(dtype: ComputeDtype, cache_dtype: KVCacheDtype) -> KVFormat:
    """How keys and values of a model of ``dtype`` are stored."""
    return KVFormat(itemsize(dtype)) if cache_dtype == "auto" else BYTES_FORMAT


class KVPools:
    """Pools of all layers, on the device and for swapped sequences.

    Attributes:
        layers: Pool of each layer.
    """

    def __init__(
        self,
        config: DecoderConfig,
        shape: CacheShape,
        dtype: ComputeDtype,
        cache_dtype: KVCacheDtype = "auto",
    ) -> None:
        """Allocate; nothing is written, so unused blocks may take no memory yet."""
        layers, self._cache_dtype = config.layer_shapes, cache_dtype
        self._block_bytes = kv_bytes_per_block(
            layers[:1], block_size=shape.block_size, kv_format=kv_format(dtype, cache_dtype)
        )
        first = 0, shape.num_gpu_blocks, shape.num_cpu_blocks
        self.layers: list[LayerPool] = []
        self._by_group: dict[int, tuple[list[LayerPool], list[LayerPool]]] = {}
        for layer in layers:
            windows = (
                (number, group.num_gpu_blocks, group.num_cpu_blocks)
                for number, group in enumerate(shape.groups, 1)
                if group.kind == "window" and layer.fits_window(group.window, "window")
            )
            number, num_gpu_blocks, num_cpu_blocks = next(windows, first)
            pools, swapped = self._by_group.setdefault(number, ([], []))
            pools.append(self._pool(num_gpu_blocks, shape.block_size, number))
            swapped.append(self._pool(num_cpu_blocks, shape.block_size, number))
            self.layers.append(pools[-1])

    def _pool(self, num_blocks: int, block_size: int, group: int) -> LayerPool:
        memory = bytes_in_huge_pages(num_blocks * self._block_bytes)
        address = int(memory.ctypes.data)
        return LayerPool(memory, address, num_blocks, block_size, group, self._cache_dtype)

    def move(self, step: Sequence[BlockMoves], num_threads: int) -> None:
        """Execute the moves of a step in each group's pools: swap out, swap in, copy."""
        for group, moves in enumerate(step):
            pools, swapped = self._by_group.get(group, ([], []))
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

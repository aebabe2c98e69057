"""KV pools of each layer on device and host, and the moves of blocks between them.

Owns the pools.  A block id means the same block in every layer of a KV group.  Device and host
number their blocks separately.  A pool is ``[num_blocks, block_size, Hkv, D + Dv]``: keys and
values of a token are adjacent, so that attention gathers both at once and a block is moved as one
range.  A pool of bytes has ``D + Dv + 4`` of them, with 4 for scales, in an order that only the
attention backend knows.

On a GPU `pagedserve.kernels` swaps and copies blocks; swaps run on a separate stream, which events
order against the steps.  On a CPU Rust does both, and without triton torch's operations.

Invariant: a block's contents before its first write are undefined.
"""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from pagedserve._core import KVGroup
from pagedserve.cache.layers import BYTES_FORMAT, KVFormat, LayerShape
from pagedserve.cache.moves import BlockMoves
from pagedserve.cache.states import LayerStates, StatePools
from pagedserve.device import Cuda
from pagedserve.host_ops.blocks import copy_blocks as copy_in_host
from pagedserve.host_ops.memory import empty_in_huge_pages
from pagedserve.kernels.reference import copy_blocks, swap_blocks


class Swapper(Protocol):
    """Swaps blocks of all layers between device and host; work queued later sees the result."""

    def swap_out(self, pairs: Tensor) -> None:
        """Int64 ``[n, 2]`` in host memory, rows of (device block, host block)."""

    def swap_in(self, pairs: Tensor) -> None:
        """Int64 ``[n, 2]`` in host memory, rows of (host block, device block)."""


class LayerSwapper:
    """Swaps without GPU kernels: in Rust in host memory, else with torch's operations."""

    def __init__(self, gpu_pools: Sequence[Tensor], cpu_pools: Sequence[Tensor]) -> None:
        """Store the pools of device and host."""
        self._gpu_pools = gpu_pools
        self._cpu_pools = cpu_pools

    def swap_out(self, pairs: Tensor) -> None:
        """Copy blocks to the host."""
        _swap(self._gpu_pools, self._cpu_pools, pairs)

    def swap_in(self, pairs: Tensor) -> None:
        """Copy blocks from the host."""
        _swap(self._cpu_pools, self._gpu_pools, pairs)


def _swap(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: Tensor) -> None:
    if sources[0].device == destinations[0].device:
        copy_in_host(sources, destinations, pairs.numpy())
        return
    for source, destination in zip(sources, destinations, strict=True):
        swap_blocks(source, destination, pairs)


class BlockPools:
    """Pools of layers whose blocks share one table per sequence, on device and host."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cuda: Cuda | None,
    ) -> None:
        """Allocate; see `CacheEngine`."""

        def pools(num_blocks: int, where: torch.device) -> list[Tensor]:
            return [_empty_pool(layer, num_blocks, block_size, dtype, where) for layer in layers]

        self.gpu = pools(num_gpu_blocks, device)
        self._cuda = cuda
        self._swapper: Swapper
        if cuda is not None and num_cpu_blocks and layers:
            from pagedserve.kernels.swap import BlockSwapper

            swapper = BlockSwapper(self.gpu, num_cpu_blocks, cuda)
            self.cpu = [swapper.host_pool(layer) for layer in range(len(layers))]
            self._swapper = swapper
        else:
            self.cpu = pools(num_cpu_blocks, torch.device("cpu"))
            self._swapper = LayerSwapper(self.gpu, self.cpu)

    def move(self, moves: BlockMoves) -> None:
        """Execute moves of blocks: swap out, swap in, copy, in this order."""
        if not self.gpu:
            return
        if (swap_out := moves.swap_out).size:
            self._swapper.swap_out(torch.from_numpy(swap_out))
        if (swap_in := moves.swap_in).size:
            self._swapper.swap_in(torch.from_numpy(swap_in))
        if (copies := moves.copy).size:
            self._copy(torch.from_numpy(copies))

    def _copy(self, pairs: Tensor) -> None:
        if self._cuda is not None:
            from pagedserve.kernels.cache import copy_layers

            copy_layers(self.gpu, pairs, self._cuda.to_device)
            return
        if self.gpu[0].device.type == "cpu":
            copy_in_host(self.gpu, self.gpu, pairs.numpy())
            return
        pairs = pairs.to(self.gpu[0].device)
        for pool in self.gpu:
            copy_blocks(pool, pairs)


class CacheEngine:
    """The KV pools of one device, and of the host for swapped blocks."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        cuda: Cuda | None = None,
        groups: Sequence[KVGroup] = (),
        states: LayerStates = (),
    ) -> None:
        """Allocate the pools; they are not written, so unused blocks may use no memory yet.

        Args:
            layers: shapes in the order of their attention calls.
            num_gpu_blocks: blocks on the model's device, of any type.
            num_cpu_blocks: blocks for swapped sequences; 0 for none.
            block_size: tokens per block.
            dtype: dtype of the pools: that of keys and values, or of bytes with scales.
            device: device of the model.
            cuda: the same device if kernels move its blocks, which needs triton; None moves them
                with torch's operations.
            groups: KV groups of the scheduler beside the first, one of a kind; windows or chunks,
                not both.
            states: shapes of recurrent states.
        """
        self.block_size = block_size
        kinds = {group.kind: group for group in groups}
        self._window_group = window_group = kinds.get("window") or kinds.get("chunked")
        state_slots = kinds.get("state")
        self.states = StatePools(
            states,
            num_slots=0 if state_slots is None else state_slots.num_gpu_blocks,
            num_cpu_slots=0 if state_slots is None else state_slots.num_cpu_blocks,
            device=device,
        )
        pools = partial(
            BlockPools,
            block_size=block_size,
            dtype=dtype,
            device=device,
            cuda=cuda if find_spec("triton") is not None else None,
        )
        others = [layer for layer in layers if not self.has_window_blocks(layer)]
        windowed = [layer for layer in layers if self.has_window_blocks(layer)]
        self._pools = pools(others, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks)
        self._window_pools = pools(
            windowed,
            num_gpu_blocks=0 if window_group is None else window_group.num_gpu_blocks,
            num_cpu_blocks=0 if window_group is None else window_group.num_cpu_blocks,
        )
        # In the order of the groups; cross attention has no pool.
        of_kind: dict[str, BlockPools | StatePools] = {
            "window": self._window_pools,
            "chunked": self._window_pools,
            "state": self.states,
        }
        self._group_pools = [self._pools, *(of_kind.get(group.kind) for group in groups)]
        of_group = [iter(self._pools.gpu), iter(self._window_pools.gpu)]
        # In the order of the layers.
        self.gpu_pools = [next(of_group[self.has_window_blocks(layer)]) for layer in layers]

    def has_window_blocks(self, layer: LayerShape) -> bool:
        """Whether a layer's blocks are those of the group of windows or chunks."""
        group = self._window_group
        if group is None:
            return False
        return layer.fits_window(group.window, "chunked" if group.kind == "chunked" else "window")

    def move(self, step: Sequence[BlockMoves]) -> None:
        """Execute the moves of a step in each group's pool; none if it is empty."""
        for pools, moves in zip(self._group_pools, step, strict=len(step) > 0):
            if pools is not None:
                pools.move(moves)

    @property
    def cpu_pools(self) -> list[Tensor]:
        """Pools in host memory of the layers with full attention."""
        return self._pools.cpu


def kv_format(dtype: torch.dtype) -> KVFormat:
    """How a pool of this dtype stores keys and values."""
    return BYTES_FORMAT if dtype.itemsize == 1 else KVFormat(dtype.itemsize)


def _empty_pool(
    layer: LayerShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    stored = kv_format(dtype)
    size = layer.key_size + layer.value_size + stored.scale_bytes // stored.itemsize
    shape = (num_blocks, block_size, layer.num_kv_heads, size)
    if device.type == "cpu":
        return empty_in_huge_pages(*shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=device)

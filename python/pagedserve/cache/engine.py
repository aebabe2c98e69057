"""KV pools of each layer on each tier, and the moves of blocks between them.

Owns the pools.  Block ids mean the same block in every layer; the two tiers have id spaces
of their own.  A pool is ``[num_blocks, block_size, Hkv, D + Dv]``: keys and values of a token
lie side by side, so that attention gathers both at once and a block moves in one piece.

Invariant: a block's contents before its first write are undefined.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.cpu.memory import empty_in_huge_pages
from pagedserve.kernels.reference import copy_blocks, swap_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer stores, as seen in a forward.

    Attributes:
        num_kv_heads: heads of keys and values.
        key_size: elements of a key of one head.
        value_size: elements of a value of one head.
        window: sliding window in tokens, or None.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None

    @property
    def elements_per_token(self) -> int:
        """Elements that a token takes in this layer's pool."""
        return self.num_kv_heads * (self.key_size + self.value_size)


class BlockMoves(Protocol):
    """The moves of a step, of ``pagedserve._core.SchedulerOutputs``: int64 ``[n, 2]`` each."""

    @property
    def has_moves(self) -> bool:
        """Whether any of the arrays has a row."""

    @property
    def blocks_to_swap_out(self) -> NDArray[np.int64]:
        """(device block, host block)."""

    @property
    def blocks_to_swap_in(self) -> NDArray[np.int64]:
        """(host block, device block)."""

    @property
    def blocks_to_copy(self) -> NDArray[np.int64]:
        """(source, destination), both on the device."""


def kv_bytes_per_block(layers: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(layer.elements_per_token for layer in layers) * block_size * dtype.itemsize


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
    ) -> None:
        """Allocate the pools; nothing is written, so unused blocks may cost no memory yet.

        Args:
            layers: in the order of their attention calls.
            num_gpu_blocks: blocks on the model's device, whatever it is.
            num_cpu_blocks: blocks for swapped sequences; 0 for none.
            block_size: tokens of a block.
            dtype: of keys and values.
            device: the model's.
        """
        self.block_size = block_size

        def pool(layer: LayerShape, num_blocks: int, where: torch.device) -> Tensor:
            size = layer.key_size + layer.value_size
            shape = (num_blocks, block_size, layer.num_kv_heads, size)
            if device.type == "cpu":
                return empty_in_huge_pages(*shape, dtype=dtype)
            # A GPU reads and writes pinned memory without a stop.
            is_pinned = where.type == "cpu" and num_blocks > 0
            return torch.empty(shape, dtype=dtype, device=where, pin_memory=is_pinned)

        def pools(num_blocks: int, where: torch.device) -> list[Tensor]:
            return [pool(layer, num_blocks, where) for layer in layers]

        self.gpu_pools = pools(num_gpu_blocks, device)
        self.cpu_pools = pools(num_cpu_blocks, torch.device("cpu"))

    def move(self, moves: BlockMoves) -> None:
        """Carry out a step's moves: swap out, swap in, copy, in this order."""
        if not moves.has_moves:
            return
        swap_out = torch.from_numpy(moves.blocks_to_swap_out)
        swap_in = torch.from_numpy(moves.blocks_to_swap_in)
        copies = torch.from_numpy(moves.blocks_to_copy)
        for gpu, cpu in zip(self.gpu_pools, self.cpu_pools, strict=True):
            if swap_out.shape[0]:
                swap_blocks(gpu, cpu, swap_out)
            if swap_in.shape[0]:
                swap_blocks(cpu, gpu, swap_in)
            if copies.shape[0]:
                copy_blocks(gpu, copies.to(gpu.device))

"""Swaps of blocks of all layers between the device and pinned host memory.

A block of one layer is tens of kilobytes, too little for a copy engine to reach the link's rate.
On the host the layers of a block are therefore adjacent, and a block of all layers is transferred
at once, as are neighboring blocks together.  On the device a kernel gathers the layers of the
blocks into a staging buffer, or scatters them from it, at the rate of device memory.

All of it runs on a separate stream, if the device has streams.  Swaps wait for compute that was
queued before them; compute that is queued after them waits only until the device's blocks have been
read or written: transfers to the host continue concurrently.

Invariant: the staging buffer is filled and emptied on the swap stream only, in order, so the chunks
of a swap do not overlap.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

if __name__.startswith("kernels."):
    raise ImportError(f"import this module as pagedserve.{__name__}: {__name__} is a second copy")

# Staging is large enough to make gathering a small part of a chunk's time, small beside the pools.
STAGING_BYTES = 64 * 2**20
# Maximum of the third dimension of a launch.
MAX_STAGED = 65535
# Words of 8 bytes per program.
WORDS = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["blocks", "layers"])
def _stage_kernel(
    staging,
    blocks,
    layers,
    num_layers,
    staging_stride,
    WORDS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Programs (part of a block, layer, index in the staging buffer); sizes in words.

    ``layers`` has for each layer its pool's address, the stride and the words of a block, and the
    offset in a staged block.
    """
    layer, place = tl.program_id(1), tl.program_id(2)
    address = tl.load(layers + layer).to(tl.pointer_type(tl.int64))
    stride = tl.load(layers + num_layers + layer)
    # Accesses of 16 bytes throughout: sizes are even, and addresses multiples of 16.
    num_words = tl.multiple_of(tl.load(layers + 2 * num_layers + layer), 2)
    offset = tl.load(layers + 3 * num_layers + layer)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < num_words
    in_pool = tl.multiple_of(address + tl.load(blocks + place) * stride, 16) + word
    staged = tl.multiple_of(staging + place.to(tl.int64) * staging_stride + offset, 16) + word
    if GATHER:
        tl.store(staged, tl.load(in_pool, mask=inside), mask=inside)
    else:
        tl.store(in_pool, tl.load(staged, mask=inside), mask=inside)


class Streams(Protocol):
    """Streams and copies of a CUDA device."""

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory that copies access directly."""

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Queue a copy between the device and pinned memory."""

    def to_device(self, host: Tensor) -> Tensor:
        """Queue a copy of a host tensor to the device; the tensor may be modified at once."""

    def stream(self) -> Any:
        """Create a stream, with ``wait_stream`` and ``synchronize``."""

    def current_stream(self) -> Any:
        """Return the stream that work is queued on."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Queue work on another stream in this context."""


class InOrder:
    """Streams for host memory, where operations are synchronous."""

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory."""
        return torch.empty(shape, dtype=dtype)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy at once."""
        destination.copy_(source)

    def to_device(self, host: Tensor) -> Tensor:
        """Return the tensor itself."""
        return host

    def stream(self) -> "InOrder":
        """Return this stream, which has no pending work."""
        return self

    current_stream = stream

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Do nothing: there is one order."""
        del stream
        return nullcontext()

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: no work is pending."""

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""


class BlockSwapper:
    """Swaps blocks between the pools of a device and a pool on the host.

    Attributes:
        host: int64 ``[num_host_blocks, words]``, pinned; a block has all layers, one after another.
    """

    def __init__(
        self, pools: Sequence[Tensor], num_host_blocks: int, streams: Streams | None = None
    ) -> None:
        """Allocate the host's pool and the staging buffer.

        Args:
            pools: pool of each layer, ``[num_blocks, ...]``, with contiguous blocks whose sizes and
                addresses are multiples of 16 bytes; kept and written in place.
            num_host_blocks: blocks of the host's pool.
            streams: streams of the pools' device; None for pools in host memory.

        Raises:
            ValueError: blocks that are not contiguous or no multiple of 16 bytes.
        """
        block_bytes = [pool[0].numel() * pool.element_size() for pool in pools]
        strides = [pool.stride(0) * pool.element_size() for pool in pools]
        for pool, size, stride in zip(pools, block_bytes, strides, strict=True):
            if not pool[0].is_contiguous() or (size | stride | pool.data_ptr()) % 16:
                raise ValueError(
                    f"a pool of {list(pool.shape)}, strides {pool.stride()} and {pool.dtype} has "
                    "blocks that are scattered or no multiple of 16 bytes"
                )
        device = pools[0].device
        words = [size // 8 for size in block_bytes]
        offsets = [sum(words[:layer]) for layer in range(len(words))]
        addresses = [pool.data_ptr() for pool in pools]
        self._pools = pools  # keeps them alive, as their addresses are stored
        self._parts = list(zip(offsets, words, strict=True))
        self._layers = torch.tensor(
            [addresses, [stride // 8 for stride in strides], words, offsets], device=device
        )
        self._num_pieces = triton.cdiv(max(words), WORDS)
        num_staged = max(1, min(STAGING_BYTES // (8 * sum(words)), num_host_blocks, MAX_STAGED))
        self._staging = torch.empty(num_staged, sum(words), dtype=torch.int64, device=device)
        self._streams = streams or InOrder()
        self._stream = self._streams.stream()
        self.host = self._streams.pinned(num_host_blocks, sum(words), dtype=torch.int64)

    def host_pool(self, layer: int) -> Tensor:
        """One layer's part of the host's pool, in the shape and dtype of its pool; a view."""
        pool = self._pools[layer]
        offset, words = self._parts[layer]
        part: Tensor = self.host[:, offset : offset + words].view(pool.dtype)
        return part.view(-1, *pool.shape[1:])

    def swap_out(self, pairs: Tensor) -> None:
        """Copy blocks to the host; work queued after this may overwrite them.

        Args:
            pairs: int64 ``[n, 2]`` in host memory, rows of (device block, host block).
        """
        compute = self._streams.current_stream()
        with self._streams.on(self._stream):
            blocks = self._streams.to_device(pairs[:, 0].contiguous())
            self._stream.wait_stream(compute)
            for start in range(0, len(pairs), len(self._staging)):
                piece = slice(start, start + len(self._staging))
                self._stage(blocks[piece], gather=True)
                if piece.stop >= len(pairs):
                    compute.wait_stream(self._stream)
                for places, host_blocks in runs(pairs[piece, 1].tolist()):
                    self._streams.copy(self._staging[places], self.host[host_blocks])

    def swap_in(self, pairs: Tensor) -> None:
        """Copy blocks from the host; work queued after this sees them.

        Args:
            pairs: int64 ``[n, 2]`` in host memory, rows of (host block, device block).
        """
        compute = self._streams.current_stream()
        with self._streams.on(self._stream):
            blocks = self._streams.to_device(pairs[:, 1].contiguous())
            for start in range(0, len(pairs), len(self._staging)):
                piece = slice(start, start + len(self._staging))
                for places, host_blocks in runs(pairs[piece, 0].tolist()):
                    self._streams.copy(self.host[host_blocks], self._staging[places])
                # Only now: compute may still read the previous contents of the device's blocks.
                self._stream.wait_stream(compute)
                self._stage(blocks[piece], gather=False)
            compute.wait_stream(self._stream)

    def wait(self) -> None:
        """Block the host until all queued work is done."""
        self._stream.synchronize()

    def _stage(self, blocks: Tensor, *, gather: bool) -> None:
        """Gather device blocks into the staging buffer, or scatter it to them."""
        num_layers = self._layers.shape[1]
        _stage_kernel[(self._num_pieces, num_layers, blocks.shape[0])](
            self._staging,
            blocks,
            self._layers,
            num_layers,
            self._staging.stride(0),
            WORDS=WORDS,
            GATHER=gather,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def runs(blocks: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Index ranges of runs of consecutive ids in a sequence, and the ids."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield slice(start, end), slice(blocks[start], blocks[end - 1] + 1)
            start = end

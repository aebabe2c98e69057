"""``StepChannel``: passes steps from the engine's process to the ranks, in shared memory.

The core writes the arrays of a step into this memory, and every rank reads them there: only a
header, the block moves and a wake-up are added.  Nothing is pickled or copied, and waiting
processes sleep.  Ranks on other machines receive the used part of that memory as one message, and
copy it to separate memory of the same layout.  What few steps need, such as adapters and image
features, is pickled and follows on the ranks' connections.  Invariants:

1. It holds one step, which is not overwritten while a rank may still read it: each rank counts the
   steps that it has completed.
2. Each counter is written by one process only.
3. The memory has no name: it is freed with the last process that maps it, however that ends.

Costs: some 10 us from ``publish`` to a sleeping rank, whatever the rows; a message is copied on
both sides, 80 us round trip over loopback for one row, 140 for 256 (benches/python/ranks.py).
"""

import itertools
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve._core.cpu import bump, wait_for_bump
from pagedserve.executor.model_step import NO_EXTRAS, ModelStep, StepExtras
from pagedserve.executor.protocol import CacheShape, StepSizes
from pagedserve.parallel.shared_memory import SharedMemory

# Each rank's counter has a separate cache line.
_LINE: Final = 64
# Seconds after which a waiting process checks whether the others are alive.
_PATIENCE: Final = 0.2
_SIZES: Final = tuple(size.name for size in fields(StepSizes))


@dataclass(frozen=True, slots=True)
class PoolMoves:
    """Moves in one pool, ``BlockMoves``: int64 ``[n, 2]`` each."""

    swap_out: NDArray[np.int64]
    swap_in: NDArray[np.int64]
    copy: NDArray[np.int64]


class StepChannel:
    """Shared memory of a step, as seen by one rank.

    Attributes:
        step: Number of steps published, for rank 0, or taken, for another rank.
    """

    def __init__(
        self,
        file: int,
        shape: CacheShape,
        *,
        rank: int,
        num_ranks: int,
        readers: Sequence[int] = (),
        connection: Connection | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the channel; ``allocate`` maps the memory.

        Args:
            file: Descriptor of the memory, which starts with that of the all-reduce.
            shape: Shape of the KV cache, which bounds moves and steps.
            rank: Rank of this process.
            num_ranks: Number of ranks.
            readers: Ranks besides 0 that map the memory; rank 0 waits for them.
            connection: Connection from rank 0 that delivers the extras of steps; None for rank 0.
            check: Raises if another rank has died.
        """
        self.step = 0
        self._file = file
        self._rank = rank
        self._num_ranks = num_ranks
        self._readers = readers
        self._connection = connection
        self._check = check
        num_blocks = shape.num_gpu_blocks + shape.num_cpu_blocks
        num_blocks += sum(group.num_gpu_blocks + group.num_cpu_blocks for group in shape.groups)
        # A step swaps a block out or in once, and copies into each at most once.
        self._max_pairs = 2 * num_blocks
        # Out, in, copied in each pool.
        self._num_lengths = 3 * (1 + len(shape.groups))
        self._max_index = shape.limits.max_num_tokens

    def allocate(self, num_bytes: int) -> Tensor:
        """Map the memory; return the part for the arrays of a step, uint8 ``[bytes]``, zeroed."""
        lengths = [
            _LINE * self._num_ranks,
            8 * (len(_SIZES) + self._num_lengths + 2),
            16 * self._max_pairs,
            4 * self._max_index,
            num_bytes,
        ]
        ends = np.cumsum([-(-length // _LINE) * _LINE for length in lengths]).tolist()
        start = SharedMemory.num_bytes(self._num_ranks)
        os.ftruncate(self._file, start + ends[-1])
        mapped = mmap.mmap(self._file, ends[-1], offset=start)
        memory = np.frombuffer(mapped, dtype=np.uint8)
        counts, header, pairs, index, arrays = (
            memory[end - -(-length // _LINE) * _LINE :][:length]
            for end, length in zip(ends, lengths, strict=True)
        )
        self._counts: NDArray[np.uint32] = counts.view(np.uint32)[:: _LINE // 4]
        self._addresses = [counts.ctypes.data + _LINE * rank for rank in range(self._num_ranks)]
        self._header: NDArray[np.int64] = header.view(np.int64)
        self._pairs: NDArray[np.int64] = pairs.view(np.int64)
        self._index: NDArray[np.int32] = index.view(np.int32)
        self._arrays: NDArray[np.uint8] = arrays
        return torch.from_numpy(arrays)

    def wait_until_read(self) -> None:
        """Wait until every rank has completed the previous step; then the next may be written.

        Raises:
            ExecutorDeadError: A rank has died.
        """
        for rank in self._readers:
            while (seen := int(self._counts[rank])) != self.step & 0xFFFFFFFF:
                wait_for_bump(self._addresses[rank], seen, _PATIENCE)
                self._check()

    def publish(self, step: ModelStep) -> None:
        """Start the step in the arrays on all ranks."""
        self.wait_until_read()
        header = self._header
        header[: len(_SIZES)] = [getattr(step.sizes, name) for name in _SIZES]
        place, start = len(_SIZES), 0
        header[place:-2] = 0
        for moves in step.moves:
            for pairs in (moves.swap_out, moves.swap_in, moves.copy):
                self._pairs[start : start + pairs.size] = pairs.reshape(-1)
                header[place] = pairs.size
                start, place = start + pairs.size, place + 1
        index = step.more_index
        header[-2] = -1 if index is None else len(index)
        header[-1] = step.extras is not NO_EXTRAS
        if index is not None:
            self._index[: len(index)] = index.numpy()
        self.step += 1
        bump(self._addresses[0])

    def message(self, pieces: Sequence[slice]) -> bytes:
        """Serialize the step that was published last, for `RemoteChannel`.

        Args:
            pieces: Byte ranges of the arrays that it uses.
        """
        num_pairs = int(self._header[len(_SIZES) : -2].sum())
        index = self._index[: max(0, int(self._header[-2]))]
        bounds = np.array([(piece.start, piece.stop) for piece in pieces], np.int64)
        arrays = [self._arrays[piece] for piece in pieces]
        parts = [np.array([len(pieces)]), bounds, self._header, self._pairs[:num_pairs], index]
        return b"".join(np.ascontiguousarray(part).data for part in [*parts, *arrays])

    def _put(self, message: bytes) -> None:
        """Write a `message` into this memory."""
        place = 0

        def take(dtype: type[np.generic], count: int) -> NDArray[Any]:
            nonlocal place
            found = np.frombuffer(message, dtype, count, place)
            place += found.nbytes
            return found

        num_pieces = int(take(np.int64, 1)[0])
        bounds = take(np.int64, 2 * num_pieces).reshape(-1, 2).tolist()
        self._header[:] = take(np.int64, self._header.size)
        num_pairs, num_wanted = int(self._header[len(_SIZES) : -2].sum()), int(self._header[-2])
        self._pairs[:num_pairs] = take(np.int64, num_pairs)
        self._index[: max(0, num_wanted)] = take(np.int32, max(0, num_wanted))
        for start, stop in bounds:
            self._arrays[start:stop] = take(np.uint8, stop - start)

    def take(self) -> ModelStep:
        """Wait until a step is published, and read it."""
        while int(self._counts[0]) == self.step & 0xFFFFFFFF:
            wait_for_bump(self._addresses[0], self.step & 0xFFFFFFFF, 3600.0)
        return self._read()

    def _read(self) -> ModelStep:
        self.step += 1
        *header, num_wanted, has_extras = self._header.tolist()
        sizes, lengths = header[: len(_SIZES)], header[len(_SIZES) :]
        index = None if num_wanted < 0 else torch.from_numpy(self._index[:num_wanted].copy())
        return ModelStep(
            sizes=StepSizes(*sizes),
            moves=self._moves(lengths) if any(lengths) else (),
            more_index=index,
            extras=self._receive_extras() if has_extras else NO_EXTRAS,
        )

    def _receive_extras(self) -> StepExtras:
        extras: StepExtras = pickle.loads(self._receive())  # noqa: S301  # of rank 0
        return extras

    def _receive(self) -> bytes:
        assert self._connection is not None  # noqa: S101  # only ranks besides 0 receive
        return self._connection.recv_bytes()

    def _moves(self, lengths: Sequence[int]) -> tuple[PoolMoves, ...]:
        ends = itertools.accumulate(lengths)
        pairs = (
            self._pairs[end - length : end].reshape(-1, 2).copy()
            for end, length in zip(ends, lengths, strict=True)
        )
        return tuple(PoolMoves(*of_pool) for of_pool in zip(pairs, pairs, pairs, strict=True))

    def done(self) -> None:
        """Mark the step as completed by this rank."""
        bump(self._addresses[self._rank])


class RemoteChannel(StepChannel):
    """Channel of a rank on another machine."""

    def __init__(
        self, connection: Connection, shape: CacheShape, *, rank: int, num_ranks: int
    ) -> None:
        """Prepare the channel with separate memory.

        Args:
            connection: Connection that delivers messages.
            shape: As in ``StepChannel``.
            rank: Rank of this process.
            num_ranks: Number of ranks.
        """
        own = os.memfd_create("pagedserve-step")
        super().__init__(own, shape, rank=rank, num_ranks=num_ranks, connection=connection)

    def take(self) -> ModelStep:
        """Wait for a step, and read it; see ``StepChannel``.

        Raises:
            EOFError: Rank 0 has ended.
        """
        self._put(self._receive())
        return self._read()

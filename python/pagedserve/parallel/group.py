"""``RankGroup``: the ranks that share a model, and their collective operations.

Only this module uses torch.distributed.  Invariants:

1. All ranks make every collective call, in the same order: the conditions for a call are equal on
   all of them, or agreed upon (``agree``).
2. Sums are bitwise equal on all ranks.

Costs: see ``SharedMemory`` for ranks that map it; with gloo 200 us to 1.5 ms per sum of a few KiB.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from pagedserve.parallel.shared_memory import SharedMemory

T = TypeVar("T")

# Timeouts: of the rendezvous; and of a collective: a rank that waits for one that died or hangs is
# killed by the watcher, and reading a large model's shards takes minutes, unequal among ranks.
_MEETING_TIMEOUT: Final = timedelta(seconds=60)
_TIMEOUT: Final = timedelta(hours=2)


class ExchangeError(RuntimeError):
    """A collective operation that failed because another rank left it."""


@contextmanager
def _exchanging() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(f"another rank left an exchange: {str(error).strip()}") from error


class MeetingPlace:
    """Rendezvous of the ranks; rank 0 leaves it when all have connected, and keeps it open.

    Attributes:
        address: A path on this machine, or ``tcp://host:port`` for any.
    """

    def __init__(self, host: str | None = None) -> None:
        """Open the rendezvous.

        Args:
            host: This machine's name or address for others; None if all ranks are on it.
        """
        self._directory = tempfile.TemporaryDirectory()
        self.address = str(Path(self._directory.name) / "store")
        if host is not None:
            self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self.address = f"tcp://{host}:{self._server.port}"

    def __enter__(self) -> Self:
        """Enter the rendezvous."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the rendezvous after all ranks have connected."""
        self._directory.cleanup()


def _store(address: str, size: int) -> Store:
    if not address.startswith("tcp://"):
        return FileStore(address, size)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return TCPStore(host, int(port), size, is_master=False, timeout=_MEETING_TIMEOUT)


class RankGroup:
    """This process among the ranks that share a model.

    Attributes:
        rank: Rank number; 0 is the engine's process.
        size: Number of ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        store: str,
        device: torch.device,
        memory: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Join the group; returns when all ranks have.

        Args:
            rank: Rank of this process.
            size: Size of the group.
            store: Rendezvous of the ranks, see `MeetingPlace`.
            device: Device of this process's tensors.
            memory: Descriptor of memory that starts with that of `SharedMemory`; None if this
                process does not map that of rank 0.
            check: Raises if another rank has died.
        """
        self.rank = rank
        self.size = size
        if device.type == "cuda":
            torch.cuda.set_device(device)
        hook = sys.excepthook  # torch's prepends the rank to each line of a traceback
        with _exchanging():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=_store(store, size),
                rank=rank,
                world_size=size,
                timeout=_MEETING_TIMEOUT,
            )
            dist.barrier()
        sys.excepthook = hook
        _set_timeout(_TIMEOUT)
        self._memory: SharedMemory | None = None
        if self.agree(memory is not None and device.type == "cpu"):
            self._memory = SharedMemory(cast(int, memory), rank, size, check)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the group itself, as a copied module has the same ranks."""
        return self

    def all_reduce(self, values: Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place."""
        if self._memory is not None and self._memory.takes(values.dtype):
            self._memory.all_reduce(values)
            return
        with _exchanging():
            dist.all_reduce(values)

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """The contiguous tensors of all ranks, of the same shape, by rank."""
        if self._memory is not None:
            return self._memory.all_gather(values)
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with _exchanging():
            dist.all_gather(parts, values)
        return parts

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank; of any type, and slow."""
        values: list[Any] = [None] * self.size
        with _exchanging():
            dist.all_gather_object(values, value)
        return values

    def agree(self, is_true: bool) -> bool:  # a plain name
        """Whether a condition is true on every rank."""
        verdict = torch.tensor([int(is_true)])
        with _exchanging():
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return bool(verdict)

    def from_first(self, make: Callable[[], T]) -> T:
        """The result of a function on rank 0, returned, or its error raised, on every rank."""
        made: list[Any] = [None, None]
        if self.rank == 0:
            try:
                made[0] = make()
            except Exception as error:  # noqa: BLE001  # sent to the other ranks
                made[1] = error
        with _exchanging():
            dist.broadcast_object_list(made, src=0)
        if made[1] is not None:
            raise made[1]
        value: T = made[0]
        return value

    def drop_others(self) -> None:
        """Leave subgroups that other code created; each has threads that wake up."""
        for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001  # no public list
            if group != dist.group.WORLD:
                dist.destroy_process_group(group)

    @staticmethod
    def is_joined() -> bool:
        """Whether this process is in a group."""
        return dist.is_initialized()

    @staticmethod
    def leave() -> None:
        """Leave the group of this process, if it is in one."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _set_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives; torch has a public function for it since 2.14."""
    public: Callable[[timedelta], None] | None = getattr(dist, "set_timeout", None)
    (public or dist.distributed_c10d._set_pg_timeout)(timeout)  # noqa: SLF001

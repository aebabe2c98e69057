"""``RankGroup``: the processes that share a model, and what they exchange.

The only module that knows torch.distributed.  Invariants:

1. Every exchange is made by all ranks, in one order: what decides whether one is made is the same
   on all of them, or agreed upon (``agree``).
2. Sums are the same to the last bit on all ranks.

Costs: see ``SharedMemory``, where all ranks map one; with gloo 200 us to 1.5 ms a sum of a few KiB.
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

# Of the meeting; and of an exchange: whoever waits for a rank that died or hangs is ended by who
# watches the ranks, and reading a large model's shards takes them minutes, and not all as many.
_MEETING_TIMEOUT: Final = timedelta(seconds=60)
_TIMEOUT: Final = timedelta(hours=2)


class ExchangeError(RuntimeError):
    """An exchange that came to nothing, for another rank left it."""


@contextmanager
def _exchanging() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(f"another rank left an exchange: {str(error).strip()}") from error


class MeetingPlace:
    """Where ranks find each other; rank 0 leaves it when all have, and keeps it while they run.

    Attributes:
        address: A path of this machine, or ``tcp://host:port`` of any.
    """

    def __init__(self, host: str | None = None) -> None:
        """Open one.

        Args:
            host: This machine's name or address for others; None where all are on it.
        """
        self._directory = tempfile.TemporaryDirectory()
        self.address = str(Path(self._directory.name) / "store")
        if host is not None:
            self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self.address = f"tcp://{host}:{self._server.port}"

    def __enter__(self) -> Self:
        """Meet."""
        return self

    def __exit__(self, *_: object) -> None:
        """All have met."""
        self._directory.cleanup()


def _store(address: str, size: int) -> Store:
    if not address.startswith("tcp://"):
        return FileStore(address, size)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return TCPStore(host, int(port), size, is_master=False, timeout=_MEETING_TIMEOUT)


class RankGroup:
    """This process among those that share a model.

    Attributes:
        rank: Its number; 0 is the engine's process.
        size: How many there are.
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
        """Join the others; returns when all have.

        Args:
            rank: Of this process.
            size: Of the group.
            store: Where they find each other, as of `MeetingPlace`.
            device: Of this process, where what is exchanged lies.
            memory: Descriptor of memory that begins with what `SharedMemory` needs; None where
                this process does not map that of rank 0.
            check: Raises where one of the others has died.
        """
        self.rank = rank
        self.size = size
        if device.type == "cuda":
            torch.cuda.set_device(device)
        hook = sys.excepthook  # torch's would put the rank before each line of a traceback
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

    def all_reduce(self, values: Tensor) -> None:
        """Add up a contiguous tensor over the ranks, in place."""
        if self._memory is not None and self._memory.takes(values.dtype):
            self._memory.all_reduce(values)
            return
        with _exchanging():
            dist.all_reduce(values)

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """The contiguous tensors of all ranks, which have one shape, by rank."""
        if self._memory is not None:
            return self._memory.all_gather(values)
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with _exchanging():
            dist.all_gather(parts, values)
        return parts

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank; of any kind, and slowly."""
        values: list[Any] = [None] * self.size
        with _exchanging():
            dist.all_gather_object(values, value)
        return values

    def agree(self, is_true: bool) -> bool:  # reads as what it says
        """Whether something is true on every rank."""
        verdict = torch.tensor([int(is_true)])
        with _exchanging():
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return bool(verdict)

    def from_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; what it raises there is raised on every rank."""
        made: list[Any] = [None, None]
        if self.rank == 0:
            try:
                made[0] = make()
            except Exception as error:  # noqa: BLE001  # the others wait for it
                made[1] = error
        with _exchanging():
            dist.broadcast_object_list(made, src=0)
        if made[1] is not None:
            raise made[1]
        value: T = made[0]
        return value

    def drop_others(self) -> None:
        """Leave the groups of some of the ranks that others made; each has threads that wake up."""
        for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001  # no public list
            if group != dist.group.WORLD:
                dist.destroy_process_group(group)

    @staticmethod
    def is_joined() -> bool:
        """Whether this process is in a group."""
        return dist.is_initialized()

    @staticmethod
    def leave() -> None:
        """Leave the group that this process is in, if it is in one."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _set_timeout(timeout: timedelta) -> None:
    """Of exchanges from now on; torch has a public function for it since 2.14."""
    public: Callable[[timedelta], None] | None = getattr(dist, "set_timeout", None)
    (public or dist.distributed_c10d._set_pg_timeout)(timeout)  # noqa: SLF001

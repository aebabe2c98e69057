"""A GPU that takes notes: what is queued on which stream, and what may run at the same time.

Every access to memory gets a vector clock of the host and of all streams.  Two accesses of the same
bytes, one of them a write, must be ordered by streams, events or waits of the host, in the order
in which the program names them; `RecordingCuda` raises `RaceError` where they are not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagedserve.device import Cuda, DeviceMemory
from pagedserve.models.adapters import AdapterRows
from pagedserve.runner.buffers import BatchSizes, StepBuffers

HOST = -1
Clock = dict[int, int]


class RaceError(Exception):
    """Two accesses whose order nobody fixed."""


@dataclass(frozen=True)
class Access:
    """Bytes of a storage that somebody reads or writes."""

    what: str
    actor: int
    time: int
    storage: int
    start: int
    end: int
    is_write: bool


def extent(tensor: Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and the first byte of it and the one behind the last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return tensor.untyped_storage()._cdata, start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(sum((length - 1) * stride for length, stride in steps))
    return tensor.untyped_storage()._cdata, start, start + (last + 1) * size


class RecordedStream:
    """A stream's place in the notes."""

    def __init__(self, cuda: "RecordingCuda", number: int) -> None:
        self.cuda, self.number = cuda, number

    def wait_stream(self, stream: "RecordedStream") -> None:
        self.cuda.log.append(f"stream {self.number} waits for {stream.number}")
        self.cuda.follow(self.number, dict(self.cuda.clocks[stream.number]))

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for stream {self.number}")
        self.cuda.follow(HOST, dict(self.cuda.clocks[self.number]))


class RecordedEvent:
    """An event; of its own number."""

    def __init__(self, cuda: "RecordingCuda", number: int) -> None:
        self.cuda, self.number = cuda, number
        self._clock: Clock = {}

    def record(self) -> None:
        self.cuda.log.append(f"record event {self.number}")
        self._clock = dict(self.cuda.clocks[self.cuda.current])

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for event {self.number}")
        self.cuda.follow(HOST, self._clock)


@dataclass
class RecordedGraph:
    """A graph; replaying it is noted."""

    cuda: "RecordingCuda"
    name: str

    def replay(self) -> None:
        self.cuda.log.append(f"replay {self.name}")


@dataclass(eq=False)
class RecordingCuda(Cuda):
    """Stands in for `Cuda`: nothing is queued, copies between real tensors are made at once.

    Attributes:
        device: of the tensors; the CPU, or a GPU that is pretended.
        log: what was asked for, in order.
        held: what the allocator says it holds: now, and at its peak.
    """

    device: torch.device
    log: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=lambda: [0, 0])
    clocks: dict[int, Clock] = field(default_factory=lambda: {HOST: {}, 0: {}})
    current: int = 0
    pinned_tensors: list[Tensor] = field(default_factory=list)
    _accesses: list[Access] = field(default_factory=list)
    _num_events: int = 0
    _num_graphs: int = 0

    def follow(self, actor: int, clock: Clock) -> None:
        """What an actor does from now on comes after all that a clock has seen."""
        own = self.clocks[actor]
        for other, time in clock.items():
            own[other] = max(own.get(other, 0), time)

    def access(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """Queue something on the current stream that reads and writes these bytes."""
        self.follow(self.current, self.clocks[HOST])
        self._access(self.current, what, reads, writes)

    def host_access(
        self, what: str, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> None:
        """The host reads and writes these bytes, now."""
        self._access(HOST, what, reads, writes)

    def _access(
        self, actor: int, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        clock = self.clocks[actor]
        clock[actor] = clock.get(actor, 0) + 1
        fresh = [
            Access(what, actor, clock[actor], *extent(tensor), is_write)
            for tensors, is_write in ((reads, False), (writes, True))
            for tensor in tensors
        ]
        for new in fresh:
            for old in self._accesses:
                overlap = old.storage == new.storage and old.start < new.end and new.start < old.end
                is_ordered = clock.get(old.actor, 0) >= old.time
                if overlap and not is_ordered and (old.is_write or new.is_write):
                    raise RaceError(f"{new.what!r} does not wait for {old.what!r}")
        self._accesses += fresh

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        with self._really():
            tensor = torch.zeros(shape, dtype=dtype)
        self.pinned_tensors.append(tensor)
        return tensor

    def pin(self, host: Tensor) -> Tensor:
        self.pinned_tensors.append(host)
        return host

    def copy(self, source: Tensor, destination: Tensor) -> None:
        pinned = (tensor.untyped_storage()._cdata for tensor in self.pinned_tensors)
        is_upload = source.untyped_storage()._cdata in pinned
        what = "upload" if is_upload else "download"
        self.log.append(f"{what} on stream {self.current}")
        self.access(what, reads=[source], writes=[destination])
        if source.device == destination.device:
            destination.copy_(source)

    def to_device(self, host: Tensor) -> Tensor:
        assert host.device.type == "cpu", "only host tensors are uploaded"
        self.log.append(f"upload on stream {self.current}")
        if self.device.type == "cpu":
            return host.clone()
        return torch.empty(host.shape, dtype=host.dtype, device=self.device)

    def event(self) -> RecordedEvent:
        self._num_events += 1
        return RecordedEvent(self, self._num_events)

    def stream(self) -> RecordedStream:
        number = len(self.clocks) - 1
        self.clocks[number] = {}
        return RecordedStream(self, number)

    def current_stream(self) -> RecordedStream:
        return RecordedStream(self, self.current)

    @contextmanager
    def on(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream.number
        try:
            yield
        finally:
            self.current = before

    def graph_pool(self) -> str:
        self.log.append("graph pool")
        return "pool"

    def capture(self, run: Callable[[], None], pool: Any) -> RecordedGraph:
        self._num_graphs += 1
        graph = RecordedGraph(self, f"graph {self._num_graphs}")
        self.log.append(f"begin {graph.name} in {pool}")
        run()
        self.log.append(f"end {graph.name}")
        return graph

    def synchronize(self) -> None:
        self.log.append("host waits for device")
        for actor in [actor for actor in self.clocks if actor != HOST]:
            self.follow(HOST, dict(self.clocks[actor]))

    def release_unused(self) -> None:
        self.log.append("release unused")

    def reserved_bytes(self) -> int:
        self.log.append("ask reserved")
        return self.held[0]

    def start_peak(self) -> None:
        self.log.append("start peak")

    def peak_reserved_bytes(self) -> int:
        self.log.append("ask peak")
        return self.held[1]

    def memory(self) -> DeviceMemory:
        self.log.append("ask memory")
        return DeviceMemory(1 << 34, 1 << 35)

    def _really(self) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        return unset_fake_temporarily()


class WatchedBuffers(StepBuffers):
    """Buffers whose writes by the host are noted."""

    def writable(self) -> Any:
        core = super().writable()
        self.host_writes("the core fills the buffers")
        return core

    def pad(self, sizes: BatchSizes, num_rows: int) -> None:
        self.host_writes("the host pads the buffers")
        super().pad(sizes, num_rows)

    def adapter_rows(self, slots: Any, kind: Any) -> AdapterRows:
        self.host_writes("the host sorts who has which adapter")
        return super().adapter_rows(slots, kind)

    def host_writes(self, what: str) -> None:
        cuda = self._cuda
        assert isinstance(cuda, RecordingCuda)
        cuda.host_access(what, writes=[self._host])

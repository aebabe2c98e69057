"""What the package asks of CUDA beside computing: order, copies, graphs and memory.

Every such call of a step, of the graphs and of the profile run goes through a `Cuda` that is
passed in, None where the model computes in host memory.  So a double that only takes notes can
stand in for a GPU: tests/dry_run asserts the order of everything here without one.

Kernels launch on the current stream by themselves, and know nothing of this module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream."""

    def record(self) -> None:
        """Stand behind all that is queued on the current stream by now; the point before is lost.

        An event that was never recorded is reached.
        """

    def synchronize(self) -> None:
        """Let the host wait until the point is reached."""


class Stream(Protocol):
    """Work that the device does in order."""

    def wait_stream(self, stream: Any) -> None:
        """What is queued here from now on waits for what is queued on the other stream by now."""

    def synchronize(self) -> None:
        """Let the host wait until all that is queued is done."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Queue the work on the current stream."""


class DeviceMemory(NamedTuple):
    """Bytes of a device: those that nobody has taken, and all."""

    free: int
    total: int


class Cuda:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Name the device; nothing is called yet."""
        self.device = device

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Host memory that copies in both directions read and write in place; undefined."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, host: Tensor) -> Tensor:
        """Make of memory that is there what ``pinned`` gives; it stays so."""
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        return host

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Queue a copy between the device and pinned memory; the host does not wait for it."""
        destination.copy_(source, non_blocking=True)

    def to_device(self, host: Tensor) -> Tensor:
        """Queue a copy of a host tensor to the device; the tensor may be changed at once."""
        return host.pin_memory().to(self.device, non_blocking=True)

    def event(self) -> Event:
        """An event that is not recorded yet."""
        return torch.cuda.Event()

    def stream(self) -> Stream:
        """A stream of its own."""
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream:
        """The stream that work is queued on."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Queue work on another stream."""
        return torch.cuda.stream(stream)

    def graph_pool(self) -> Any:
        """Memory that several graphs share."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], pool: Any) -> Graph:
        """Record what a function queues, once the device is idle; nothing of it is done.

        Args:
            run: the function; it may not wait for the device.
            pool: memory of `graph_pool`, for what the work allocates.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        return graph

    def synchronize(self) -> None:
        """Let the host wait until the device is idle."""
        torch.cuda.synchronize(self.device)

    def release_unused(self) -> None:
        """Give back what torch's allocator holds and no tensor uses."""
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        """What torch's allocator holds of the device, in use or not."""
        return torch.cuda.memory_reserved(self.device)

    def start_peak(self) -> None:
        """Let `peak_reserved_bytes` count from here."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_reserved_bytes(self) -> int:
        """The most that torch's allocator held since `start_peak`."""
        return torch.cuda.max_memory_reserved(self.device)

    def memory(self) -> DeviceMemory:
        """Memory of the device, whoever holds it."""
        return DeviceMemory(*torch.cuda.mem_get_info(self.device))


def cuda_of(device: torch.device) -> Cuda | None:
    """The calls for a model's device; None where it computes in host memory."""
    return Cuda(device) if device.type == "cuda" else None


def to_device(host: Tensor, cuda: Cuda | None) -> Tensor:
    """A host tensor where the logits are, without waiting for what the device still does."""
    return host if cuda is None else cuda.to_device(host)

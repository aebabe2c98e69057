"""Choice of a device, and CUDA calls other than kernels: synchronization, copies, graphs, memory.

Every such call of a step, of the graphs and of the profile run goes through a `Cuda` that is
passed in, None where the model computes in host memory.  A double that records calls can replace
it: tests/dry_run asserts the order of all of them without a GPU.

Kernels launch on the current stream directly and do not use this module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagedserve.errors import ConfigError


class Event(Protocol):
    """A point in a stream."""

    def record(self) -> None:
        """Record the point after all work queued on the current stream, replacing an earlier one.

        An event that was never recorded counts as reached.
        """

    def synchronize(self) -> None:
        """Block the host until the event is reached."""


class Stream(Protocol):
    """A queue of device work that runs in order."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work of this stream wait for the work queued on another stream so far."""

    def synchronize(self) -> None:
        """Block the host until all queued work has finished."""


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None:
        """Queue the graph on the current stream."""


class DeviceMemory(NamedTuple):
    """Memory of a device in bytes: free and total."""

    free: int
    total: int


class Cuda:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Store the device; makes no CUDA call."""
        self.device = device

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate uninitialized pinned host memory, for asynchronous copies in both directions."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, host: Tensor) -> Tensor:
        """Pin existing host memory permanently."""
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        return host

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Queue a copy between the device and pinned memory without blocking the host."""
        destination.copy_(source, non_blocking=True)

    def to_device(self, host: Tensor) -> Tensor:
        """Queue a copy of a host tensor to the device; the tensor may be modified at once."""
        return host.pin_memory().to(self.device, non_blocking=True)

    def event(self) -> Event:
        """Create an event that is not recorded yet."""
        return torch.cuda.Event()

    def stream(self) -> Stream:
        """Create a stream."""
        return torch.cuda.Stream(self.device)

    def current_stream(self) -> Stream:
        """Return the stream that work is queued on."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Queue work on another stream in this context."""
        return torch.cuda.stream(stream)

    def graph_pool(self) -> Any:
        """Create a memory pool shared by several graphs."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], pool: Any) -> Graph:
        """Capture the work that a function queues, once the device is idle; does not run it.

        Args:
            run: the function; it must not synchronize with the device.
            pool: memory pool of `graph_pool`, for allocations of the work.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        return graph

    def synchronize(self) -> None:
        """Block the host until the device is idle."""
        torch.cuda.synchronize(self.device)

    def release_unused(self) -> None:
        """Release memory that torch's allocator caches and no tensor uses."""
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator has reserved, in use or not."""
        return torch.cuda.memory_reserved(self.device)

    def start_peak(self) -> None:
        """Reset the peak of `peak_reserved_bytes`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_reserved_bytes(self) -> int:
        """Peak bytes reserved by torch's allocator since `start_peak`."""
        return torch.cuda.max_memory_reserved(self.device)

    def memory(self) -> DeviceMemory:
        """Free and total memory of the device, all processes included."""
        return DeviceMemory(*torch.cuda.mem_get_info(self.device))


def cuda_of(device: torch.device) -> Cuda | None:
    """Return the `Cuda` of a model's device; None where it computes in host memory."""
    return Cuda(device) if device.type == "cuda" else None


def to_device(host: Tensor, cuda: Cuda | None) -> Tensor:
    """Copy a host tensor to the device of the logits without blocking the host."""
    return host if cuda is None else cuda.to_device(host)


def choose_device(name: str) -> torch.device:
    """Return the device of that name; a GPU becomes the current device, on which kernels launch.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N"; "auto" is the first visible GPU, else the CPU.

    Raises:
        ConfigError: The GPU does not exist.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    if num_gpus == 0:
        reason = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise ConfigError(
            f"device is {name!r}, and torch {torch.__version__} {reason}: give 'cpu' or 'auto'"
        )
    if index >= num_gpus:
        raise ConfigError(
            f"device is {name!r}, and there are {num_gpus} CUDA devices: accepted are cuda:0 to "
            f"cuda:{num_gpus - 1}"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device

"""``RankedExecutor``: tensor parallelism; this process is rank 0.

All ranks compute each step together; only this process samples and knows requests.  Invariants:

1. This process completes every step that it has published: Ctrl-C is deferred.
2. An error during a published step stops all ranks, which would wait for each other, and raises
   ``ExecutorDeadError``.  Errors before or after do not affect other ranks.
"""

import os
import pickle
import weakref
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from pagedserve.config import EngineArgs
from pagedserve.device import choose_device
from pagedserve.errors import ConfigError
from pagedserve.executor.adapter_slots import AdapterSlots
from pagedserve.executor.channel import StepChannel
from pagedserve.executor.launched import LaunchedRun
from pagedserve.executor.local import Driver, DriverExecutor
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.model_step import NO_EXTRAS, ModelStep
from pagedserve.executor.processes import Backend, RankProcesses
from pagedserve.executor.protocol import CacheShape, StepInput, StepLimits
from pagedserve.executor.subprocesses import LocalBackend
from pagedserve.executor.worker import Worker
from pagedserve.models.split import check_split
from pagedserve.parallel.group import ExchangeError, MeetingPlace, RankGroup
from pagedserve.sigint import sigint_deferred


class RankedExecutor(DriverExecutor):
    """Rank 0, which runs the other ranks; an ``Executor``."""

    def __init__(self, args: EngineArgs) -> None:
        """Start the other ranks and load the model, a shard on each.

        Raises:
            ConfigError: This process is already a rank of a running group.
            UnsupportedModelError: The model cannot be sharded; nothing was started.
            ExecutorDeadError: A rank died.
        """
        check_split(args)
        self._args = args
        self._shape: CacheShape | None = None
        self._channel: StepChannel | None = None
        self._adapters: AdapterSlots | None = None
        self._start()
        self._adapters = self.driver.adapters

    def _start(self) -> None:
        args = self._args
        _leave_dead_group(args)
        size = args.tensor_parallel_size
        num_threads = max(1, torch.get_num_threads() // size)
        backend = _backend(args)
        self._memory = os.memfd_create("pagedserve-steps")
        self._place = MeetingPlace(backend.host)
        with self._place:
            self._ranks = RankProcesses(
                args, backend, self._place.address, self._memory, num_threads
            )
            self._end = weakref.finalize(
                self, _end, self._ranks, self._memory, torch.get_num_threads()
            )
            _latest[:] = [(self._ranks, self._end)]
            try:
                self._ranks.answers()  # wait until they run
                torch.set_num_threads(num_threads)
                self._ranks.ask("join")
                device = torch.device(choose_device(args.device).type, backend.device_index)
                group = RankGroup(
                    0,
                    size,
                    store=self._place.address,
                    device=device,
                    memory=self._memory,
                    check=self._ranks.check,
                )
                self._driver = Driver(args, Worker(args, group), self._adapters)
                self._ranks.answers()
            except BaseException as error:
                self._end()
                if isinstance(error, ExchangeError):
                    raise self._ranks.failure(error) from error
                raise

    @property
    def driver(self) -> Driver:
        """Runs the steps.

        Raises:
            ExecutorDeadError: A rank has died, or the executor was shut down.
        """
        self._ranks.check()
        assert self._driver is not None  # noqa: S101  # while the ranks are alive
        return self._driver

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """Compute the number of KV blocks, the minimum over all ranks."""
        self._ranks.ask("determine_num_blocks", limits)
        plans: list[MemoryPlan] = [
            self.worker.determine_num_blocks(limits),
            *self._ranks.answers(),
        ]
        return min(plans, key=lambda plan: plan.num_gpu_blocks)

    def init_cache(self, shape: CacheShape) -> None:
        """Allocate KV pools and step buffers; called once, before the first step."""
        self._shape = shape
        channel = self._channel = StepChannel(
            self._memory,
            shape,
            rank=0,
            num_ranks=self._args.tensor_parallel_size,
            readers=self._ranks.readers,
            check=self._ranks.check,
        )
        self._ranks.ask("init_cache", shape)
        self.worker.init_cache(shape, channel)
        self._ranks.answers()

    def launch(self, step: StepInput) -> LaunchedRun:
        """Launch one step on all ranks; see ``Executor``.

        Raises:
            ExecutorDeadError: A rank has died.
        """
        return self.driver.launch(step, self._forward)

    def _forward(self, step: ModelStep, previous_tokens: Tensor | None) -> Tensor:
        """Run the model of all ranks; see ``Worker.forward``."""
        worker, channel = self.worker, self._channel
        assert channel is not None  # noqa: S101  # launched after init_cache
        if previous_tokens is not None:
            worker.buffers.complete(step.sizes, previous_tokens)
        with sigint_deferred():
            channel.publish(step)
            self._ranks.launched()
            try:
                self._send(channel, step)
                found = worker.forward(step)
            except Exception as error:
                raise self._ranks.failure(error) from error
            self._ranks.finished()
        return found

    def _send(self, channel: StepChannel, step: ModelStep) -> None:
        """Send what ranks do not read in the shared memory of the published step."""
        if remote := self._ranks.remote_connections:
            message = channel.message(self.worker.buffers.used(step.sizes))
            for connection in remote:
                connection.send_bytes(message)
        if step.extras is not NO_EXTRAS:
            message = pickle.dumps(step.extras)
            for connection in self._ranks.connections:
                connection.send_bytes(message)

    def check(self) -> None:
        """Check that steps can be run; thread-safe."""
        self._ranks.check()

    def restart(self) -> None:
        """Reload everything that died; pools and their contents are lost."""
        self._free()
        self._start()
        self.driver.adapters.lose()
        if self._shape is not None:
            self.init_cache(self._shape)

    def shutdown(self) -> None:
        """Stop its processes and free weights and pools; no step may be running."""
        self._free()

    def _free(self) -> None:
        """End the ranks, and free the shard of this process."""
        self._end()
        self._channel = None
        self._free_model()


def _backend(args: EngineArgs) -> Backend:
    if args.distributed_executor_backend == "mp":
        return LocalBackend(args.tensor_parallel_size)
    from pagedserve.executor.actors import RayBackend

    return RayBackend(args)


# The ranks that were started last, and their finalizer: a process is in one group at a time.
_latest: Final[list[tuple[RankProcesses, Callable[[], object]]]] = []


def _leave_dead_group(args: EngineArgs) -> None:
    """Leave the group of ranks that have died, though their engine still exists.

    Raises:
        ConfigError: This process is in a group whose ranks are alive, or of another library.
    """
    for ranks, end in _latest:
        if ranks.is_dead:
            end()
    if RankGroup.is_joined():
        raise ConfigError(
            f"tensor_parallel_size is {args.tensor_parallel_size}, and this process is in a group "
            "of ranks already, as torch.distributed allows one: shut the other engine down first"
        )


def _end(ranks: RankProcesses, memory: int, num_threads: int) -> None:
    """Stop the ranks, leave their group and restore the number of threads; called once."""
    if ranks.is_inherited:  # in a forked child, which does not own them
        return
    _latest[:] = [latest for latest in _latest if latest[0] is not ranks]
    ranks.end()
    os.close(memory)
    RankGroup.leave()
    torch.set_num_threads(num_threads)

"""``RankedExecutor``: tensor parallelism; this process is rank 0.

All ranks compute each step together; only this process samples and knows requests.  Invariants:

1. This process completes every step that it has published: Ctrl-C is deferred.
2. An error during a published step stops all ranks, which would wait for each other, and raises
   ``ExecutorDeadError``.  Errors before or after do not affect other ranks.
"""

import os
import weakref
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, UnsupportedModelError
from pagedserve.executor.channel import StepChannel
from pagedserve.executor.local import LocalExecutor
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.model_step import ModelStep
from pagedserve.executor.processes import Backend, RankProcesses
from pagedserve.executor.protocol import CacheShape, StepLimits
from pagedserve.executor.subprocesses import LocalBackend
from pagedserve.models.device import choose_device
from pagedserve.models.loader import LoadedModel
from pagedserve.models.split import check_split
from pagedserve.parallel.group import ExchangeError, MeetingPlace, RankGroup
from pagedserve.runner.buffers import BatchSizes, StepBuffers
from pagedserve.sigint import sigint_deferred


class RankedExecutor(LocalExecutor):
    """Rank 0, which runs the other ranks; an ``Executor``."""

    def __init__(self, args: EngineArgs) -> None:
        """Start the other ranks and load the model, a shard on each.

        Raises:
            ConfigError: This process is already a rank of a running group.
            UnsupportedModelError: The model cannot be sharded; nothing was started.
            ExecutorDeadError: A rank died.
        """
        check_split(args)
        self._shape: CacheShape | None = None
        self._start(args)

    def _start(self, args: EngineArgs) -> None:
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
                super().__init__(args, group)
                self._ranks.answers()
                _check_model(self.loaded)
            except BaseException as error:
                self._end()
                if isinstance(error, ExchangeError):
                    raise self._ranks.failure(error) from error
                raise

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """Compute the number of KV blocks, the minimum over all ranks."""
        self._ranks.ask("determine_num_blocks", limits)
        plans: list[MemoryPlan] = [super().determine_num_blocks(limits), *self._ranks.answers()]
        return min(plans, key=lambda plan: plan.num_gpu_blocks)

    def init_cache(self, shape: CacheShape) -> None:  # type: ignore[override]
        """Allocate KV pools and step buffers; called once, before the first step."""
        self._shape = shape
        self._channel = StepChannel(
            self._memory,
            shape,
            rank=0,
            num_ranks=self._args.tensor_parallel_size,
            readers=self._ranks.readers,
            check=self._ranks.check,
        )
        self._ranks.ask("init_cache", shape)
        super().init_cache(shape, self._channel)
        self._ranks.answers()

    def forward(self, step: ModelStep, previous_tokens: Tensor | None = None) -> Tensor:
        """Run the model of all ranks on a step; see ``LocalExecutor``."""
        self._ranks.check()
        if previous_tokens is not None:
            self.buffers.complete(step.sizes, previous_tokens)
        with sigint_deferred():
            self._channel.publish(step)
            self._ranks.launched()
            try:
                self._send(step.sizes)
                logits = super().forward(step)
            except Exception as error:
                raise self._ranks.failure(error) from error
            self._ranks.finished()
        return logits

    def _send(self, sizes: BatchSizes) -> None:
        """Send the published step to the ranks on other machines."""
        if connections := self._ranks.connections:
            message = self._channel.message(self.buffers.used(sizes))
            for connection in connections:
                connection.send_bytes(message)

    @property
    def buffers(self) -> StepBuffers:
        """Arrays that the core fills before ``launch``; available after ``init_cache``.

        Raises:
            ExecutorDeadError: A rank has died.
        """
        self._ranks.check()
        return super().buffers

    def check(self) -> None:
        """Check that steps can be run; thread-safe."""
        self._ranks.check()

    def restart(self) -> None:
        """Reload everything that died; pools and their contents are lost."""
        args, shape = self._args, self._shape
        self._end()
        # Drops the old weights and pools, but keeps what a retry needs if this one fails.
        kept = {"_args": args, "_shape": shape, "_ranks": self._ranks, "_end": self._end}
        self.__dict__.clear()
        self.__dict__.update(kept)
        self._start(args)
        if shape is not None:
            self.init_cache(shape)

    def shutdown(self) -> None:
        """Stop its processes and free weights and pools; no step may be running."""
        self._end()
        super().shutdown()


def _backend(args: EngineArgs) -> Backend:
    if args.distributed_executor_backend == "mp":
        return LocalBackend(args.tensor_parallel_size)
    from pagedserve.executor.actors import RayBackend

    return RayBackend(args)


def _check_model(loaded: LoadedModel) -> None:
    if loaded.states:
        raise UnsupportedModelError(
            "tensor_parallel_size is for models that keep nothing of a sequence but keys and "
            f"values; {type(loaded.model).__name__} has layers with states"
        )


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

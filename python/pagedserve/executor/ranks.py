"""``RankedExecutor``: a model that several processes share, of which this one is rank 0.

Each step is computed by all ranks together; this process alone samples, and only it knows requests.
Invariants:

1. Once a step is published this process takes part in it to the end: Ctrl-C waits.
2. Whatever goes wrong between the two ends all ranks, and is told as ``ExecutorDeadError``: they
   would wait for each other.  What goes wrong before or after concerns nobody else.
"""

import os
import weakref

import torch
from torch import Tensor

from pagedserve.attention.cross import CrossStep
from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, UnsupportedModelError
from pagedserve.executor.channel import StepChannel
from pagedserve.executor.launched import StepWork
from pagedserve.executor.local import LocalExecutor
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.processes import Backend, RankProcesses
from pagedserve.executor.protocol import CacheShape, StepLimits
from pagedserve.executor.subprocesses import LocalBackend
from pagedserve.models.device import choose_device
from pagedserve.models.flat_batch import StepImages
from pagedserve.models.loader import LoadedModel
from pagedserve.models.split import check_split
from pagedserve.parallel.group import ExchangeError, MeetingPlace, RankGroup
from pagedserve.runner.buffers import StepBuffers
from pagedserve.sigint import sigint_deferred


class RankedExecutor(LocalExecutor):
    """Rank 0 of several, which runs the others; an ``Executor``."""

    def __init__(self, args: EngineArgs) -> None:
        """Start the others and load the model, each its part.

        Raises:
            ConfigError: Options that ranks cannot obey.
            UnsupportedModelError: A model that cannot be shared; nothing was started.
            ExecutorDeadError: A rank died.
        """
        _check_options(args)
        check_split(args)
        if RankGroup.is_joined():
            raise ConfigError(
                f"tensor_parallel_size is {args.tensor_parallel_size}, and this process is in a "
                "group of ranks already, as torch.distributed allows one: shut the other engine "
                "down first"
            )
        self._shape: CacheShape | None = None
        self._start(args)

    def _start(self, args: EngineArgs) -> None:
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
            try:
                self._ranks.answers()  # they run
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
                self.shutdown()
                if isinstance(error, ExchangeError):
                    raise self._ranks.failure(error) from error
                raise

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """See ``Executor``; as many as the rank has that has room for the fewest."""
        self._ranks.ask("determine_num_blocks", limits)
        plans: list[MemoryPlan] = [super().determine_num_blocks(limits), *self._ranks.answers()]
        return min(plans, key=lambda plan: plan.num_gpu_blocks)

    def init_cache(self, shape: CacheShape) -> None:  # type: ignore[override]
        """See ``Executor``."""
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

    def forward(
        self,
        step: StepWork,
        more_index: Tensor | None = None,
        previous_tokens: Tensor | None = None,
        images: StepImages | None = None,
        cross: CrossStep | None = None,
    ) -> Tensor:
        """See ``LocalExecutor``."""
        self._ranks.check()
        if previous_tokens is not None:
            self.buffers.complete(step, previous_tokens)
        with sigint_deferred():
            self._channel.publish(step, None if more_index is None else more_index.numpy())
            self._ranks.launched()
            try:
                self._send(step)
                logits = super().forward(step, more_index, None, images, cross)
            except Exception as error:
                raise self._ranks.failure(error) from error
            self._ranks.finished()
        return logits

    def _send(self, step: StepWork) -> None:
        """Have the ranks of other machines run the step that is published."""
        if connections := self._ranks.connections:
            message = self._channel.message(self.buffers.used(step))
            for connection in connections:
                connection.send_bytes(message)

    @property
    def buffers(self) -> StepBuffers:
        """See ``Executor``.

        Raises:
            ExecutorDeadError: A rank has died.
        """
        self._ranks.check()
        return super().buffers

    def check(self) -> None:
        """See ``Executor``."""
        self._ranks.check()

    def restart(self) -> None:
        """See ``Executor``."""
        args, shape = self._args, self._shape
        self.shutdown()
        # Not the weights and pools of before; but what another attempt needs, if this one fails.
        kept = {"_args": args, "_shape": shape, "_ranks": self._ranks, "_end": self._end}
        self.__dict__.clear()
        self.__dict__.update(kept)
        self._start(args)
        if shape is not None:
            self.init_cache(shape)

    def shutdown(self) -> None:
        """See ``Executor``."""
        self._end()


def _backend(args: EngineArgs) -> Backend:
    if args.distributed_executor_backend == "mp":
        return LocalBackend(args.tensor_parallel_size)
    from pagedserve.executor.actors import RayBackend

    return RayBackend(args)


def _check_options(args: EngineArgs) -> None:
    """Refuse what only one process can do so far."""
    for name, neutral in (("enable_lora", False), ("quantization", None)):
        if (value := getattr(args, name)) != neutral:
            raise ConfigError(
                f"{name} is {value!r}, which one process alone does so far, and "
                f"tensor_parallel_size is {args.tensor_parallel_size}: leave one of the two out"
            )


def _check_model(loaded: LoadedModel) -> None:
    if loaded.states:
        raise UnsupportedModelError(
            "tensor_parallel_size is for models that keep nothing of a sequence but keys and "
            f"values; {type(loaded.model).__name__} has layers with states"
        )


def _end(ranks: RankProcesses, memory: int, num_threads: int) -> None:
    """End the ranks and leave their group, with the threads of before; called once."""
    ranks.end()
    os.close(memory)
    RankGroup.leave()
    torch.set_num_threads(num_threads)

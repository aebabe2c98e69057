"""Executors of torch models: what surrounds the model in a step, and one process that runs it all.

``Driver`` runs in the engine's process alone: encoders and adapters come before the model of all
ranks, sampling or pooling after it.  ``LocalExecutor`` has the model in this process, on one
device; `pagedserve.executor.ranks` has ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.config import EngineArgs
from pagedserve.errors import StepError
from pagedserve.executor.adapter_slots import AdapterSlots
from pagedserve.executor.launched import LaunchedRun, tokens_of
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.model_step import NO_EXTRAS, ModelStep, StepExtras
from pagedserve.executor.protocol import CacheShape, ModelInfo, StepInput, StepLimits, StepSizes
from pagedserve.executor.worker import Worker, pools_others
from pagedserve.inputs.prompt_images import PlacedImage
from pagedserve.lora.host import HostAdapter
from pagedserve.models.image_features import image_positions
from pagedserve.pooling.pooler import pool_rows, token_types
from pagedserve.pooling.rules import PoolingRules
from pagedserve.runner.buffers import StepBuffers
from pagedserve.runner.encoder import encode_prompts
from pagedserve.runner.images import ImageTower
from pagedserve.sampling.sampler import Sampler
from pagedserve.sampling.tensors import as_array, ops_for

# As ``Worker.forward``: of this process, or of all ranks.
Forward: TypeAlias = Callable[[ModelStep, Tensor | None], Tensor]


class Driver:
    """Runs whole steps over the model of a worker.

    Attributes:
        worker: Worker of this process.
        adapters: Adapters of the model.
    """

    def __init__(
        self, args: EngineArgs, worker: Worker, adapters: AdapterSlots | None = None
    ) -> None:
        """Start with an empty cache of images.

        Args:
            args: Options of the engine.
            worker: Worker of this process.
            adapters: Adapters of a worker before this one; None starts without.
        """
        self.worker = worker
        targets = {} if worker.adapters is None else worker.adapters.targets
        self.adapters = AdapterSlots(args, targets) if adapters is None else adapters
        self._tower = ImageTower(worker.loaded.model, int(args.mm_processor_cache_gb * 2**30))
        self._ops = ops_for(worker.cuda)
        self._sampler = Sampler(self._ops)
        loaded = worker.loaded
        self._sends_states = worker.is_shared and bool(loaded.states)
        self._sends_cross = worker.is_shared and loaded.encoder_decoder is not None
        self._needs_extras = self._sends_states or self._sends_cross or pools_others(loaded)

    def launch(self, step: StepInput, forward: Forward) -> LaunchedRun:
        """Launch one step: encoders, adapters, moves, forward pass, sampling.

        Args:
            step: The step; its arrays are in the buffers.
            forward: Runs the model.

        Raises:
            StepError: The numbers of rows and samples differ.
        """
        step.check()
        sizes, rows = step.sizes, step.rows
        states, failed = self._encode(step)
        lookups = self._tower.lookups if step.images else (0, 0)
        if failed:
            return LaunchedRun(failed=failed, image_lookups=lookups)
        previous = tokens_of(step.after)
        previous = None if previous is None else torch.as_tensor(previous)
        found = forward(self._model_step(step, states), previous)
        if sizes.num_rows == 0:
            return LaunchedRun()
        if (rules := self.worker.loaded.pooling) is not None:
            return LaunchedRun(pooled=as_array(self._pool(sizes, rules, found)), ops=self._ops)
        logits = as_array(found)
        samples = self._sampler.launch(logits[: len(rows)], rows) if rows else None
        more = logits[len(rows) :]
        return LaunchedRun(samples, step.prompts, more, image_lookups=lookups, ops=self._ops)

    def _encode(self, step: StepInput) -> tuple[Mapping[int, Tensor], Mapping[int, str]]:
        """Run the encoders on a step's images and encoder inputs.

        Returns:
            Encoder states of the prompts that start in the step, by row, and the error of each row
            that failed.
        """
        if step.images:
            buffers = self.worker.buffers
            return {}, self._tower.encode(step.images, buffers.query_start, buffers.positions)
        if step.encoder_inputs:
            return encode_prompts(self.worker.loaded.model, step.encoder_inputs)
        return {}, {}

    def _model_step(self, step: StepInput, states: Mapping[int, Tensor]) -> ModelStep:
        """The model's input of a step whose images are encoded; ``states`` are an encoder's."""
        index = None if step.prompts is None else torch.from_numpy(step.prompts.index)
        has_adapters, extras = self.worker.adapters is not None, NO_EXTRAS
        adapters = self.adapters.load(step.adapters) if has_adapters else ()
        if adapters or step.images or states or self._needs_extras:
            extras = replace(self._extras(step), adapters=adapters, encoder_states=states)
        return ModelStep(sizes=step.sizes, moves=step.moves, more_index=index, extras=extras)

    def _extras(self, step: StepInput) -> StepExtras:
        """Image features of a step, segments of pooled text pairs, and slots of states."""
        buffers, images, types = self.worker.buffers, None, None
        ends = buffers.query_start[: step.sizes.num_rows + 1]
        if step.images:
            images = self._tower.of_step(step.images, ends, buffers.positions)
        if pools_others(self.worker.loaded):
            sampled = buffers.sample_rows[: step.sizes.num_samples]
            types = token_types(ends, sampled, [row.pair_start for row in step.rows])
        sizes = step.sizes
        return StepExtras(
            images=images,
            token_types=types,
            state_slots=buffers.state_slots[: sizes.num_rows] if self._sends_states else None,
            cross=(
                buffers.cross_tables(sizes.num_rows, sizes.max_num_cross_blocks)
                if self._sends_cross
                else None
            ),
        )

    def _pool(self, sizes: StepSizes, rules: PoolingRules, states: Tensor) -> Tensor:
        """Pool each prompt that ends in the step, float32 ``[S, F]``; see ``Worker.forward``."""
        loaded, buffers = self.worker.loaded, self.worker.buffers
        if not pools_others(loaded):
            return states
        sampled = buffers.sample_rows[: sizes.num_samples]
        ends = buffers.query_start[: sizes.num_rows + 1]
        vectors = torch.stack(pool_rows(states.float(), ends, rules.pooling_type))
        vectors = vectors[torch.from_numpy(sampled.copy()).to(vectors.device)]
        return vectors if loaded.head is None else loaded.head(vectors)


class DriverExecutor(ABC):
    """What a ``Driver`` does of an ``Executor``, whether one process or several run the model."""

    _driver: Driver | None = None

    @property
    @abstractmethod
    def driver(self) -> Driver:
        """Runs the steps, unless the model is gone."""

    @property
    def worker(self) -> Worker:
        """Holds the model of this process and its KV pools; see ``driver``."""
        return self.driver.worker

    @property
    def model_info(self) -> ModelInfo:
        """Properties of the model."""
        return self.worker.model_info

    @property
    def buffers(self) -> StepBuffers:
        """Arrays that the core fills before ``launch``; available after ``init_cache``."""
        return self.worker.buffers

    def load_adapter(self, name: str, path: str) -> HostAdapter:
        """Load the adapter of a directory into host memory; thread-safe, callable during a step."""
        return self.driver.adapters.host.load(name, path)

    def drop_adapter(self, ordinal: int) -> None:
        """Evict an adapter from host memory once it is no longer referenced."""
        self.driver.adapters.host.drop(ordinal)

    def image_positions(
        self, token_ids: Sequence[int], images: Sequence[PlacedImage]
    ) -> NDArray[np.int64] | None:
        """Positions ``[3, P]`` of a prompt of P tokens, for models with 3D positions."""
        return image_positions(self.worker.loaded.model, token_ids, images)

    def _free_model(self) -> None:
        """Free the weights and pools of this process."""
        if self._driver is None:
            return
        cuda, self._driver = self._driver.worker.cuda, None
        if cuda is not None:
            cuda.release_unused()


class LocalExecutor(DriverExecutor):
    """Loads a model into this process and runs steps on it; an ``Executor``."""

    def __init__(self, args: EngineArgs) -> None:
        """Load the model; see `Worker` for the errors."""
        self._driver = Driver(args, Worker(args))

    @property
    def driver(self) -> Driver:
        """Runs the steps.

        Raises:
            StepError: The executor was shut down.
        """
        if self._driver is None:
            raise StepError("the executor was shut down")
        return self._driver

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """Compute the number of KV blocks; on a GPU the largest steps are profiled."""
        return self.worker.determine_num_blocks(limits)

    def init_cache(self, shape: CacheShape) -> None:
        """Allocate KV pools and step buffers; called once, before the first step."""
        self.worker.init_cache(shape)

    def launch(self, step: StepInput) -> LaunchedRun:
        """Launch one step; see ``Executor``."""
        return self.driver.launch(step, self.worker.forward)

    def check(self) -> None:
        """Do nothing: a single process is alive."""

    def restart(self) -> None:
        """Do nothing: nothing has died."""

    def shutdown(self) -> None:
        """Free weights and pools; no step may be running."""
        self._free_model()

"""``LocalExecutor``: the model in the engine's process, on one device."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedserve.config import EngineArgs
from pagedserve.errors import StepError
from pagedserve.executor.driver import Driver
from pagedserve.executor.launched import LaunchedRun
from pagedserve.executor.memory import MemoryPlan
from pagedserve.executor.protocol import CacheShape, ModelInfo, StepInput, StepLimits
from pagedserve.executor.worker import Worker
from pagedserve.inputs.prompt_images import PlacedImage
from pagedserve.lora.host import HostAdapter
from pagedserve.runner.buffers import StepBuffers


class LocalExecutor:
    """Loads a model into this process and runs steps on it; an ``Executor``."""

    def __init__(self, args: EngineArgs) -> None:
        """Load the model; see `Worker` for the errors."""
        self._driver: Driver | None = Driver(args, Worker(args))

    @property
    def driver(self) -> Driver:
        """Runs the steps.

        Raises:
            StepError: The executor was shut down.
        """
        if self._driver is None:
            raise StepError("the executor was shut down")
        return self._driver

    @property
    def worker(self) -> Worker:
        """Holds the model and its KV pools; see ``driver``."""
        return self.driver.worker

    @property
    def model_info(self) -> ModelInfo:
        """Properties of the model."""
        return self.worker.model_info

    @property
    def buffers(self) -> StepBuffers:
        """Arrays that the core fills before ``launch``; available after ``init_cache``."""
        return self.worker.buffers

    def determine_num_blocks(self, limits: StepLimits) -> MemoryPlan:
        """Compute the number of KV blocks; on a GPU the largest steps are profiled."""
        return self.worker.determine_num_blocks(limits)

    def init_cache(self, shape: CacheShape) -> None:
        """Allocate KV pools and step buffers; called once, before the first step."""
        self.worker.init_cache(shape)

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
        return self.driver.image_positions(token_ids, images)

    def launch(self, step: StepInput) -> LaunchedRun:
        """Launch one step; see ``Executor``."""
        driver = self.driver
        return driver.launch(step, driver.worker.forward)

    def check(self) -> None:
        """Do nothing: a single process is alive."""

    def restart(self) -> None:
        """Do nothing: nothing has died."""

    def shutdown(self) -> None:
        """Free weights and pools; no step may be running."""
        if self._driver is None:
            return
        cuda, self._driver = self._driver.worker.cuda, None
        if cuda is not None:
            cuda.release_unused()

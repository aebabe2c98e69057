"""The executor for one process: one worker, in this process."""

from collections.abc import Sequence

from torch import Tensor

from pagedserve.config import EngineArgs
from pagedserve.errors import StepError
from pagedserve.executor.available import AvailableBlocks, StepLimits
from pagedserve.executor.worker import LaunchedStep, StepOutputs, Worker
from pagedserve.models.loader import LoadedModel
from pagedserve.runner.buffers import StepBuffers
from pagedserve.sampling.rows import PromptTargets, RowSampling


class Executor:
    """Carries out the steps that the engine's scheduler decides."""

    def __init__(self, args: EngineArgs) -> None:
        """Load the model; see `pagedserve.models.loader.load_model` for the errors."""
        self._worker = Worker(args)
        self._buffers: StepBuffers | None = None

    @property
    def loaded(self) -> LoadedModel:
        """The model and what is known of it."""
        return self._worker.loaded

    @property
    def buffers(self) -> StepBuffers:
        """The arrays that the core fills before `launch`.

        Raises:
            StepError: before `init_cache`.
        """
        if self._buffers is None:
            raise StepError("the executor has no KV cache yet: call init_cache first")
        return self._buffers

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one KV block takes; see `Worker.kv_bytes_per_block` for the error."""
        return self._worker.kv_bytes_per_block(block_size)

    def profile_num_available_blocks(
        self, *, limits: StepLimits, block_size: int, utilization: float
    ) -> AvailableBlocks:
        """KV blocks that fit on the GPU; see `Worker.profile_num_available_blocks`."""
        return self._worker.profile_num_available_blocks(
            limits=limits, block_size=block_size, utilization=utilization
        )

    def init_cache(
        self,
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        max_num_tokens: int,
        max_num_rows: int,
        max_model_len: int,
    ) -> None:
        """Allocate KV pools and step buffers; see `Worker.init_cache`."""
        self._buffers = self._worker.init_cache(
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=block_size,
            max_num_tokens=max_num_tokens,
            max_num_rows=max_num_rows,
            max_model_len=max_model_len,
        )

    def launch(
        self,
        outputs: StepOutputs,
        rows: Sequence[RowSampling],
        prompts: PromptTargets | None = None,
        previous_tokens: Tensor | None = None,
    ) -> LaunchedStep:
        """Begin one step, whose inputs the core has written to the buffers.

        On a GPU this returns once everything is queued, on the CPU once the model has run.

        Args:
            outputs: the step's decisions.
            rows: parameters of its samples, S of them.
            prompts: positions whose log-probabilities are wanted besides.
            previous_tokens: of the step before, where the host does not know them yet: an input
                of ``-1 - i`` stands for token i.

        Returns:
            The step, whose results are the samples, in the order of ``rows``, and what ``prompts``
            asks for.

        Raises:
            StepError: if rows are not as many as the step's samples.
        """
        if outputs.num_rows and len(rows) != outputs.num_samples:
            raise StepError(f"{len(rows)} sampling parameters for {outputs.num_samples} samples")
        return self._worker.launch(outputs, rows, prompts, previous_tokens)

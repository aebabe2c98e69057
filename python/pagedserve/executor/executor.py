"""The executor for one process: one worker, in this process."""

from collections.abc import Sequence

from pagedserve.config import ModelConfig
from pagedserve.errors import StepError
from pagedserve.executor.available import AvailableBlocks, StepLimits
from pagedserve.executor.worker import StepOutputs, StepResults, Worker
from pagedserve.models.loader import LoadedModel
from pagedserve.runner.buffers import StepBuffers
from pagedserve.sampling.batch import RowSampling
from pagedserve.sampling.logprobs import PromptTargets


class Executor:
    """Carries out the steps that the engine's scheduler decides."""

    def __init__(self, model_config: ModelConfig) -> None:
        """Load the model; see `pagedserve.models.loader.load_model` for the errors."""
        self._worker = Worker(model_config)
        self._buffers: StepBuffers | None = None

    @property
    def loaded(self) -> LoadedModel:
        """The model, its tokenizer and what is known of them."""
        return self._worker.loaded

    @property
    def buffers(self) -> StepBuffers:
        """The arrays that the core fills before `execute`.

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

    def execute(
        self,
        outputs: StepOutputs,
        rows: Sequence[RowSampling],
        prompts: PromptTargets | None = None,
    ) -> StepResults:
        """Carry out one step, whose inputs the core has written to the buffers.

        Args:
            outputs: the step's decisions.
            rows: parameters of its samples, S of them.
            prompts: positions whose log-probabilities are wanted besides.

        Returns:
            The samples, in the order of ``rows``, and what ``prompts`` asks for.

        Raises:
            StepError: if rows are not as many as the step's samples.
        """
        if outputs.num_rows and len(rows) != outputs.num_samples:
            raise StepError(f"{len(rows)} sampling parameters for {outputs.num_samples} samples")
        return self._worker.execute(outputs, rows, prompts)

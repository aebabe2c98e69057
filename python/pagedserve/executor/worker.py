"""One device: its model, its KV pools, and the steps they carry out."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from pagedserve.cache.engine import BlockMoves, CacheEngine
from pagedserve.config import ModelConfig
from pagedserve.models.loader import load_model
from pagedserve.runner.buffers import StepBuffers, StepSizes
from pagedserve.runner.model_runner import ModelRunner
from pagedserve.sampling.batch import RowSampling
from pagedserve.sampling.logprobs import PositionLogprobs, PromptTargets
from pagedserve.sampling.sampler import SampledRows, Sampler


class StepResults(NamedTuple):
    """What a step gave: samples, and what was asked about prompts."""

    sampled: SampledRows
    prompts: PositionLogprobs | None


class StepOutputs(StepSizes, BlockMoves, Protocol):
    """What a worker reads of ``pagedserve._core.SchedulerOutputs``."""


class Worker:
    """Holds one model and runs steps on it."""

    def __init__(self, model_config: ModelConfig) -> None:
        """Load the model; see `pagedserve.models.loader.load_model` for the errors."""
        self.loaded = load_model(model_config)
        self._sampler = Sampler()

    def init_cache(
        self,
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        max_num_tokens: int,
        max_num_rows: int,
        max_model_len: int,
    ) -> StepBuffers:
        """Allocate pools and buffers; called once, before the first step.

        Args:
            num_gpu_blocks: blocks on the model's device.
            num_cpu_blocks: blocks for swapped sequences.
            block_size: tokens of a block.
            max_num_tokens: most tokens of a step.
            max_num_rows: most rows of a step.
            max_model_len: most tokens of a sequence.

        Returns:
            The buffers that the core fills.
        """
        self._cache = CacheEngine(
            self.loaded.layers,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=block_size,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
        )
        buffers = StepBuffers(
            max_num_tokens=max_num_tokens,
            max_num_rows=max_num_rows,
            max_blocks_per_row=-(-max_model_len // block_size),
            device=self.loaded.device,
        )
        self._runner = ModelRunner(self.loaded, buffers, self._cache)
        return buffers

    def execute(
        self, outputs: StepOutputs, rows: Sequence[RowSampling], prompts: PromptTargets | None
    ) -> StepResults:
        """Moves, forward, sampling."""
        self._cache.move(outputs)
        if outputs.num_rows == 0:
            return StepResults(SampledRows.none(), None)
        index = None if prompts is None else torch.from_numpy(prompts.index)
        logits = self._runner.execute(outputs, index)
        sampled = self._sampler.sample(logits[: len(rows)], rows) if rows else SampledRows.none()
        if prompts is None:
            return StepResults(sampled, None)
        return StepResults(sampled, prompts.score(logits[len(rows) :]))

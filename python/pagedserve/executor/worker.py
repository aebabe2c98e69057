"""One device: its model, its KV pools, and the steps they carry out."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagedserve.attention.backends import check_block_size
from pagedserve.cache.engine import BlockMoves, CacheEngine, kv_bytes_per_block
from pagedserve.config import EngineArgs
from pagedserve.device import Cuda, cuda_of
from pagedserve.executor.available import AvailableBlocks, StepLimits
from pagedserve.models.loader import load_model
from pagedserve.runner.buffers import StepBuffers, StepSizes
from pagedserve.runner.forward import Forward
from pagedserve.runner.graphs import DecodeGraphs, reserved_bytes
from pagedserve.runner.model_runner import ModelRunner
from pagedserve.runner.padded import ladder
from pagedserve.runner.profile import peak_bytes, run_trial
from pagedserve.sampling.logprobs import prompt_logprobs
from pagedserve.sampling.results import PositionLogprobs, SampledRows
from pagedserve.sampling.rows import PromptTargets, RowSampling
from pagedserve.sampling.sampler import LaunchedSamples, Sampler


class StepResults(NamedTuple):
    """What a step gave: samples, and what was asked about prompts."""

    sampled: SampledRows
    prompts: PositionLogprobs | None


class LaunchedStep:
    """A step on its way: what it is to give may still be made by the device."""

    def __init__(
        self, samples: LaunchedSamples | None, prompts: PromptTargets | None, logits: Tensor | None
    ) -> None:
        """Keep what is needed for the results.

        Args:
            samples: of the step; None where it samples nothing.
            prompts: what was asked about prompts.
            logits: float32 ``[P, V]``, of the positions of ``prompts``.
        """
        self._samples = samples
        self._prompts = prompts
        self._logits = logits

    @property
    def is_async_safe(self) -> bool:
        """Whether tokens are sampled, all of them on the device, and nothing else is wanted."""
        return self._samples is not None and self._prompts is None and self._samples.is_async_safe

    def tokens(self) -> Tensor | None:
        """The tokens of a step that stands alone, int32 ``[S]`` on its device."""
        return None if self._samples is None else self._samples.tokens()

    def results(self) -> StepResults:
        """Wait for the step; called before another is launched, unless it stands alone."""
        sampled = SampledRows.none() if self._samples is None else self._samples.results()
        if self._prompts is None or self._logits is None:
            return StepResults(sampled, None)
        return StepResults(sampled, prompt_logprobs(self._prompts, self._logits))


class StepOutputs(StepSizes, BlockMoves, Protocol):
    """What a worker reads of ``pagedserve._core.SchedulerOutputs``."""


class Worker:
    """Holds one model and runs steps on it."""

    def __init__(self, args: EngineArgs) -> None:
        """Load the model; see `pagedserve.models.loader.load_model` for the errors."""
        self.loaded = load_model(args)
        self._cuda = cuda_of(self.loaded.device)
        is_recordable = self._cuda is not None and self.loaded.attention_backend == "triton"
        self._captures_graphs = is_recordable and not args.enforce_eager
        self._sampler = Sampler(self._cuda)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one KV block takes, all layers together.

        Raises:
            ConfigError: for blocks that the attention backend cannot read.
        """
        loaded = self.loaded
        check_block_size(loaded.attention_backend, block_size)
        return kv_bytes_per_block(loaded.layers, block_size=block_size, dtype=loaded.dtype)

    def profile_num_available_blocks(
        self, *, limits: StepLimits, block_size: int, utilization: float
    ) -> AvailableBlocks:
        """Run the largest steps on the GPU and find how many KV blocks fit beside them.

        Args:
            limits: of a step.
            block_size: tokens of a block.
            utilization: share of the GPU's memory that may be taken in all.

        Raises:
            torch.OutOfMemoryError: the largest steps do not even fit without a KV cache.
        """
        cuda = Cuda(self.loaded.device)
        trial = partial(
            run_trial,
            self.loaded,
            num_samples=limits.max_num_rows,
            block_size=block_size,
            cuda=cuda,
        )
        prefill = peak_bytes(cuda, partial(trial, limits.largest_prefill()))
        decode = peak_bytes(cuda, partial(trial, limits.largest_decode()))
        graphs = 0
        if self._captures_graphs:
            graphs = reserved_bytes(
                ladder(limits.max_num_rows),
                vocab_size=self.loaded.vocab_size,
                activation_bytes=decode,
            )
        free, total = cuda.memory()
        budget, used, activations = int(total * utilization), total - free, max(prefill, decode)
        left = max(0, budget - used - activations - graphs)
        return AvailableBlocks(
            num_blocks=left // self.kv_bytes_per_block(block_size),
            total_bytes=total,
            budget_bytes=budget,
            used_bytes=used,
            activation_bytes=activations,
            graph_bytes=graphs,
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
            cuda=self._cuda,
        )
        buffers = StepBuffers(
            max_num_tokens=max_num_tokens,
            max_num_rows=max_num_rows,
            max_blocks_per_row=-(-max_model_len // block_size),
            cuda=self._cuda,
        )
        forward = Forward(self.loaded, self._cache)
        graphs = None
        if self._cuda is not None and self._captures_graphs:
            sizes = ladder(max_num_rows)
            graphs = DecodeGraphs(forward, buffers, sizes=sizes, block_size=block_size)
            graphs.capture(self.loaded.vocab_size, self._cuda)
        self._runner = ModelRunner(forward, buffers, block_size, graphs)
        return buffers

    def launch(
        self,
        outputs: StepOutputs,
        rows: Sequence[RowSampling],
        prompts: PromptTargets | None,
        previous_tokens: Tensor | None,
    ) -> LaunchedStep:
        """Moves, forward, sampling; see `Executor.launch`."""
        self._cache.move(outputs)
        if outputs.num_rows == 0:
            return LaunchedStep(None, None, None)
        index = None if prompts is None else torch.from_numpy(prompts.index)
        logits = self._runner.execute(outputs, index, previous_tokens)
        samples = self._sampler.launch(logits[: len(rows)], rows) if rows else None
        return LaunchedStep(samples, prompts, logits[len(rows) :])

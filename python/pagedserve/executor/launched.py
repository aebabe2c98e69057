"""A step on its way through the model of this process, and its results."""

from typing import Protocol

from torch import Tensor

from pagedserve.cache.engine import BlockMoves
from pagedserve.executor.protocol import ModelOutput
from pagedserve.runner.buffers import BatchSizes
from pagedserve.sampling.logprobs import prompt_logprobs
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling.rows import PromptTargets
from pagedserve.sampling.sampler import LaunchedSamples


class StepWork(BatchSizes, BlockMoves, Protocol):
    """What is to be computed: of ``SchedulerOutputs``, or of what another process is told."""


class LaunchedRun:
    """A step that this process launched: a ``StepHandle``."""

    def __init__(
        self,
        samples: LaunchedSamples | None = None,
        prompts: PromptTargets | None = None,
        logits: Tensor | None = None,
        pooled: Tensor | None = None,
    ) -> None:
        """Keep what is needed for the results.

        Args:
            samples: Of the step; None where it samples nothing.
            prompts: What was asked about prompts.
            logits: Float32 ``[P, V]``, of the positions of ``prompts``.
            pooled: Float32 ``[S, F]``, in the place of all that, where the model pools.
        """
        self._pooled = pooled
        self._samples = samples
        self._prompts = prompts
        self._logits = logits

    @property
    def is_async_safe(self) -> bool:
        """See ``StepHandle``."""
        return self._samples is not None and self._prompts is None and self._samples.is_async_safe

    def tokens(self) -> Tensor | None:
        """The tokens of a step that is async-safe, int32 ``[S]`` on its device."""
        return None if self._samples is None else self._samples.tokens()

    def results(self) -> ModelOutput:
        """Wait for the step; called before another is launched, unless it is async-safe."""
        if self._pooled is not None:
            pooled = self._pooled.cpu().numpy()
            return ModelOutput(SampledRows.of_nothing(len(pooled)), None, pooled)
        sampled = SampledRows.none() if self._samples is None else self._samples.results()
        if self._prompts is None or self._logits is None:
            return ModelOutput(sampled, None)
        return ModelOutput(sampled, prompt_logprobs(self._prompts, self._logits))

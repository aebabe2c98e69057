"""A launched step of this process, and its results."""

from typing import Protocol

from torch import Tensor

from pagedserve.cache.moves import StepMoves
from pagedserve.executor.protocol import ModelOutput
from pagedserve.runner.buffers import BatchSizes
from pagedserve.sampling.logprobs import prompt_logprobs
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling.rows import PromptTargets
from pagedserve.sampling.sampler import LaunchedSamples


class StepWork(BatchSizes, StepMoves, Protocol):
    """Sizes and moves of a step: of ``SchedulerOutputs``, or as received by another rank."""


class LaunchedRun:
    """A step launched by this process: a ``StepHandle``."""

    def __init__(
        self,
        samples: LaunchedSamples | None = None,
        prompts: PromptTargets | None = None,
        logits: Tensor | None = None,
        pooled: Tensor | None = None,
    ) -> None:
        """Store what the results need.

        Args:
            samples: Samples of the step; None if it samples nothing.
            prompts: Positions of prompts that need log-probabilities.
            logits: Logits of the positions of ``prompts``, float32 ``[P, V]``.
            pooled: Vectors of a pooling model, float32 ``[S, F]``, instead of all those.
        """
        self._pooled = pooled
        self._samples = samples
        self._prompts = prompts
        self._logits = logits

    @property
    def is_async_safe(self) -> bool:
        """Whether the step needs one token per row only, available on the device by now."""
        return self._samples is not None and self._prompts is None and self._samples.is_async_safe

    def tokens(self) -> Tensor | None:
        """Tokens of a step that is async-safe, int32 ``[S]`` on its device."""
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

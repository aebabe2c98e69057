"""A launched step of this process, and its results."""

from collections.abc import Mapping

from pagedserve.errors import StepError
from pagedserve.executor.protocol import ModelOutput, StepHandle
from pagedserve.sampling.on_host import HOST
from pagedserve.sampling.ops import Array, SamplingOps
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling.rows import PromptTargets
from pagedserve.sampling.sampler import LaunchedSamples, prompt_logprobs


class LaunchedRun:
    """A step launched by this process: a ``StepHandle``."""

    def __init__(
        self,
        samples: LaunchedSamples | None = None,
        prompts: PromptTargets | None = None,
        logits: Array | None = None,
        *,
        pooled: Array | None = None,
        failed: Mapping[int, str] | None = None,
        image_lookups: tuple[int, int] = (0, 0),
        ops: SamplingOps = HOST,
    ) -> None:
        """Store what the results need.

        Args:
            samples: Samples of the step; None if it samples nothing.
            prompts: Positions of prompts that need log-probabilities.
            logits: Logits of the positions of ``prompts``, float32 ``[P, V]``.
            pooled: Vectors of a pooling model, float32 ``[S, F]``, instead of all those.
            failed: Errors of rows, if the model did not run for them; see ``ModelOutput``.
            image_lookups: See ``ModelOutput``.
            ops: Operations on ``logits`` and ``pooled``.
        """
        self._pooled = pooled
        self._samples = samples
        self._prompts = prompts
        self._logits = logits
        self._failed = failed
        self._image_lookups = image_lookups
        self._ops = ops

    @property
    def is_async_safe(self) -> bool:
        """Whether the step needs one token per row only, available on the device by now."""
        return self._samples is not None and self._prompts is None and self._samples.is_async_safe

    def tokens(self) -> Array | None:
        """Tokens of a step that is async-safe, int32 ``[S]``, where its logits are."""
        return None if self._samples is None else self._samples.tokens()

    def results(self) -> ModelOutput:
        """Wait for the step; called before another is launched, unless it is async-safe."""
        lookups = self._image_lookups
        if self._failed:
            return ModelOutput(SampledRows.none(), failed=self._failed, image_lookups=lookups)
        if self._pooled is not None:
            pooled = self._ops.download(self._pooled)
            return ModelOutput(SampledRows.of_nothing(len(pooled)), None, pooled)
        sampled = SampledRows.none() if self._samples is None else self._samples.results()
        if self._prompts is None or self._logits is None:
            return ModelOutput(sampled, image_lookups=lookups)
        found = prompt_logprobs(self._prompts, self._logits, self._ops)
        return ModelOutput(sampled, found, image_lookups=lookups)


def tokens_of(after: StepHandle | None) -> Array | None:
    """Tokens of the step that another follows, int32 ``[S]``, where its logits are; None if none.

    Raises:
        StepError: It was launched by another executor.
    """
    if after is None:
        return None
    if not isinstance(after, LaunchedRun):
        raise StepError("a step follows one that another executor launched")
    return after.tokens()

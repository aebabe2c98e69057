"""The model over the KV pools: from a step's inputs to logits."""

from typing import cast

from torch import Tensor

from pagedserve.attention.backends import write_and_attend
from pagedserve.attention.interface import StepAttention, answering
from pagedserve.cache.engine import CacheEngine
from pagedserve.errors import StepError
from pagedserve.models.loader import LoadedModel
from pagedserve.runner.buffers import StepInputs


class Forward:
    """One model over one set of KV pools."""

    def __init__(self, loaded: LoadedModel, cache: CacheEngine) -> None:
        """Put the parts together; nothing is copied."""
        self._model = loaded.model
        self._write_and_attend = write_and_attend(loaded.attention_backend)
        self._windows = [layer.window for layer in loaded.layers]
        self._cache = cache

    def __call__(self, inputs: StepInputs, index: Tensor | None = None) -> Tensor:
        """Run the model on one step: a flat batch, ``[1, T]``.

        Args:
            inputs: of the step.
            index: int32 ``[N]``, positions in T whose logits are wanted; None wants all.

        Returns:
            Logits ``[N, V]``, in the model's dtype.

        Raises:
            StepError: if not every layer attended over the pools.
        """
        attention = StepAttention(
            inputs.metadata, self._cache.gpu_pools, self._windows, self._write_and_attend
        )
        with answering(attention):
            output = self._model(
                input_ids=inputs.token_ids,
                position_ids=inputs.positions,
                use_cache=False,
                logits_to_keep=0 if index is None else index,
            )
        if attention.num_calls != len(self._windows):
            raise StepError(
                f"the model made {attention.num_calls} attention calls instead of "
                f"{len(self._windows)}"
            )
        return cast(Tensor, output.logits)[0]

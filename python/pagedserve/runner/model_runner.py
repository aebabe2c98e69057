"""Runs the model on one step: a flat batch without padding, ``[1, T]``."""

from typing import cast

import torch
from torch import Tensor

from pagedserve.attention.interface import StepAttention, answering
from pagedserve.cache.engine import CacheEngine
from pagedserve.errors import StepError
from pagedserve.models.loader import LoadedModel
from pagedserve.runner.buffers import StepBuffers, StepSizes


class ModelRunner:
    """One model over one set of buffers and KV pools."""

    def __init__(self, loaded: LoadedModel, buffers: StepBuffers, cache: CacheEngine) -> None:
        """Put the parts together; nothing is copied."""
        self._model = loaded.model
        self._backend = loaded.attention_backend
        self._windows = [layer.window for layer in loaded.layers]
        self._buffers = buffers
        self._cache = cache

    @torch.inference_mode()
    def execute(self, sizes: StepSizes, more_index: Tensor | None = None) -> Tensor:
        """Run the step whose inputs are in the buffers.

        Args:
            sizes: of the step.
            more_index: int32 ``[P]``, positions in T whose logits are wanted besides those of
                the samples.

        Returns:
            Logits, float32 ``[S + P, V]``.

        Raises:
            StepError: if not every layer attended over the pools.
        """
        inputs = self._buffers.inputs(sizes, self._cache.block_size)
        index = inputs.sample_index
        if more_index is not None:
            index = torch.cat((index, more_index.to(index.device)))
        attention = StepAttention(
            inputs.metadata, self._cache.gpu_pools, self._windows, self._backend
        )
        with answering(attention):
            output = self._model(
                input_ids=inputs.token_ids,
                position_ids=inputs.positions,
                use_cache=False,
                logits_to_keep=index,
            )
        if attention.num_calls != len(self._windows):
            raise StepError(
                f"the model made {attention.num_calls} attention calls instead of "
                f"{len(self._windows)}"
            )
        return cast(Tensor, output.logits)[0].float()

"""From a step's inputs to logits: the model over the KV pools, run the way that suits the step."""

from typing import Protocol

import torch
from torch import Tensor

from pagedserve.attention.backends import write_and_attend
from pagedserve.attention.interface import PagedAttention, answering
from pagedserve.cache.engine import CacheEngine
from pagedserve.errors import StepError
from pagedserve.models.flat_batch import flat_batch_logits
from pagedserve.models.loader import LoadedModel
from pagedserve.runner.buffers import BatchSizes, StepBuffers, StepInputs


class Forward:
    """One model over one set of KV pools."""

    def __init__(self, loaded: LoadedModel, cache: CacheEngine) -> None:
        """Put the parts together; nothing is copied."""
        self._model = loaded.model
        self._selects_logits = loaded.selects_logits
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
        attention = PagedAttention(
            inputs.metadata, self._cache.gpu_pools, self._windows, self._write_and_attend
        )
        with answering(attention):
            logits = flat_batch_logits(
                self._model,
                inputs.token_ids,
                inputs.positions,
                index,
                selects_logits=self._selects_logits,
            )
        if attention.num_calls != len(self._windows):
            raise StepError(
                f"the model made {attention.num_calls} attention calls instead of "
                f"{len(self._windows)}"
            )
        return logits


class DecodeRunner(Protocol):
    """A way of its own to run decode steps."""

    def fits(self, step: BatchSizes) -> bool:
        """Whether it takes such a step."""

    def run(self, step: BatchSizes, previous_tokens: Tensor | None = None) -> Tensor:
        """Logits, float32 ``[R, V]``, of a step that fits; valid until the next step."""


class ModelRunner:
    """One model over one set of buffers and KV pools."""

    def __init__(
        self,
        forward: Forward,
        buffers: StepBuffers,
        block_size: int,
        padded: DecodeRunner | None = None,
    ) -> None:
        """Put the parts together; nothing is copied.

        Args:
            forward: the model.
            buffers: that the core fills.
            block_size: tokens of a block.
            padded: takes the decode steps that it fits; None runs every step as it is.
        """
        self._forward = forward
        self._buffers = buffers
        self._block_size = block_size
        self._padded = padded

    @torch.inference_mode()
    def execute(
        self,
        sizes: BatchSizes,
        more_index: Tensor | None = None,
        previous_tokens: Tensor | None = None,
    ) -> Tensor:
        """Run the step whose inputs are in the buffers.

        Args:
            sizes: of the step.
            more_index: int32 ``[P]`` in host memory, positions in T whose logits are wanted
                besides those of the samples.
            previous_tokens: int32 ``[S']``, for which inputs stand; see `StepBuffers.upload`.

        Returns:
            Logits, float32 ``[S + P, V]``; valid until the next step.

        Raises:
            StepError: if not every layer attended over the pools.
        """
        if self._padded is not None and more_index is None and self._padded.fits(sizes):
            return self._padded.run(sizes, previous_tokens)
        inputs = self._buffers.inputs(sizes, self._block_size, previous_tokens)
        index = inputs.sample_index
        if more_index is not None:
            index = torch.cat((index, self._buffers.to_device(more_index)))
        return self._forward(inputs, index).float()

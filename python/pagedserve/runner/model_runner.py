"""Model runner: from a step's inputs to logits, with the best method for the step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagedserve.attention.cross import CrossStep, EncoderDecoderAttention
from pagedserve.attention.interface import PagedAttention
from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.cache.engine import CacheEngine
from pagedserve.errors import StepError
from pagedserve.lora.apply import AdapterModules
from pagedserve.models.adapters import StepAdapters
from pagedserve.models.forward import (
    ForwardContext,
    StepImages,
    decoder_logits,
    flat_batch_hidden_states,
    flat_batch_logits,
)
from pagedserve.models.loader import LoadedModel
from pagedserve.models.states import PooledStates
from pagedserve.runner.buffers import BatchSizes, StepBuffers, StepInputs


class Forward:
    """Forward pass of a model over one set of KV pools.

    Attributes:
        selects_logits: whether the model computes only the requested logits.
    """

    def __init__(self, loaded: LoadedModel, cache: CacheEngine) -> None:
        """Store the components without copies."""
        self._model = loaded.model
        self.selects_logits = loaded.selects_logits
        self._backend = loaded.attention_backend
        self._windows = [layer.window for layer in loaded.layers]
        self._has_window_blocks = [cache.has_window_blocks(layer) for layer in loaded.layers]
        self._cache = cache
        self._states = loaded.states
        self._is_encoder = loaded.is_encoder
        # Layers of an encoder need only the keys of the step: one pool serves all.
        pools = cache.gpu_pools
        self._pools = pools * len(self._windows) if loaded.is_encoder else pools

    def __call__(
        self,
        inputs: StepInputs,
        index: Tensor | None = None,
        token_types: Tensor | None = None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Run the model on one step: a flat batch, ``[1, T]``.

        Args:
            inputs: inputs of the step.
            index: int32 ``[N]``, positions in T that need logits; None is all.
            token_types: int64 ``[T]``, segment of each token of a text pair, for an encoder; None
                for single texts.
            adapters: rows of the adapters; None if no row has one.

        Returns:
            Logits ``[N, V]``, in the model's dtype; for a pooling model, states ``[N, F]``.

        Raises:
            StepError: a layer did not attend over the pools.
        """
        attention = self._attention(inputs)
        context = ForwardContext(
            attention=attention,
            positions=inputs.positions,
            adapters=adapters,
            states=self._states_of(inputs.metadata.layout) if self._states else None,
            encoder_states=None if inputs.cross is None else inputs.cross.states,
        )
        logits = self._run(inputs, context, index, token_types)
        if attention.num_calls != len(self._windows):
            raise StepError(
                f"the model made {attention.num_calls} attention calls instead of "
                f"{len(self._windows)}"
            )
        return logits

    def _attention(self, inputs: StepInputs) -> PagedAttention:
        if inputs.cross is not None:
            return EncoderDecoderAttention(
                inputs.metadata, self._pools, self._backend, inputs.cross
            )
        return PagedAttention(
            inputs.metadata,
            self._pools,
            self._windows,
            self._backend,
            causal=not self._is_encoder,
            of_layers=self._of_layers(inputs),
        )

    def _of_layers(self, inputs: StepInputs) -> Sequence[AttentionMetadata] | None:
        """The step of each layer; None if all layers share blocks."""
        if inputs.window_metadata is None:
            return None
        of_blocks = inputs.metadata, inputs.window_metadata
        return [of_blocks[has_window_blocks] for has_window_blocks in self._has_window_blocks]

    def _states_of(self, layout: BatchLayout) -> PooledStates:
        """The states in the slots of the rows."""
        pools = self._cache.states.device
        return PooledStates(self._states, pools, layout, self._model.device)

    def _run(
        self,
        inputs: StepInputs,
        context: ForwardContext,
        index: Tensor | None,
        token_types: Tensor | None,
    ) -> Tensor:
        if self._is_encoder:
            states = flat_batch_hidden_states(self._model, inputs.token_ids, context, token_types)
            return states if index is None else states.index_select(0, index)
        if inputs.cross is not None:
            logits = decoder_logits(self._model, inputs.token_ids, context)
            return logits if index is None else logits.index_select(0, index)
        return flat_batch_logits(
            self._model,
            inputs.token_ids,
            context,
            index,
            selects_logits=self.selects_logits,
            images=inputs.images,
        )


class DecodeRunner(Protocol):
    """A special method to run decode steps."""

    def fits(self, step: BatchSizes) -> bool:
        """Whether it supports a step."""

    def run(
        self, step: BatchSizes, previous_tokens: Tensor | None = None, *, is_adapted: bool = False
    ) -> Tensor:
        """Logits, float32 ``[R, V]``, of a supported step; valid until the next step."""


class ModelRunner:
    """One model over one set of buffers and KV pools."""

    def __init__(
        self,
        forward: Forward,
        buffers: StepBuffers,
        block_size: int,
        padded: DecodeRunner | None = None,
        adapters: AdapterModules | None = None,
    ) -> None:
        """Store the components without copies.

        Args:
            forward: forward pass of the model.
            buffers: buffers that the core fills.
            block_size: tokens per block.
            padded: runs the decode steps that it supports; None runs every step unpadded.
            adapters: adapters of the model; None without adapters.
        """
        self._adapters = adapters
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
        images: StepImages | None = None,
        cross: CrossStep | None = None,
    ) -> Tensor:
        """Run the step whose inputs are in the buffers.

        Args:
            sizes: sizes of the step.
            more_index: int32 ``[P]`` in host memory, positions in T that need logits besides those
                of the samples.
            previous_tokens: int32 ``[S']``, tokens that inputs refer to; see `StepBuffers.upload`.
            images: image inputs of the step; None for text only.
            cross: inputs of cross-attention; None for decoder-only models.

        Returns:
            Logits, float32 ``[S + P, V]``; valid until the next step.

        Raises:
            StepError: a layer did not attend over the pools.
        """
        is_adapted = self._is_adapted(sizes)
        is_plain = more_index is None and images is None
        if self._padded is not None and is_plain and self._padded.fits(sizes):
            return self._padded.run(sizes, previous_tokens, is_adapted=is_adapted)
        # Sorted first, since kernels read the result, which is uploaded with the step.
        adapters = self._step_adapters(sizes, more_index) if is_adapted else None
        inputs = self._buffers.inputs(sizes, self._block_size, previous_tokens)
        if images is not None or cross is not None:
            inputs = replace(inputs, images=images, cross=cross)
        index = None if self._samples_all(sizes) else inputs.sample_index
        if more_index is not None:
            index = torch.cat((inputs.sample_index, self._buffers.to_device(more_index)))
        return self._forward(inputs, index, adapters=adapters).float()

    @torch.inference_mode()
    def hidden_states(self, sizes: BatchSizes, token_types: Tensor | None = None) -> Tensor:
        """Run the step in the buffers; return the hidden states of all its tokens, ``[T, F]``.

        Args:
            sizes: sizes of the step.
            token_types: as in ``Forward``, in host memory.

        Raises:
            StepError: as in ``execute``.
        """
        inputs = self._buffers.inputs(sizes, self._block_size)
        types = None if token_types is None else token_types.to(inputs.token_ids.device)
        return self._forward(inputs, token_types=types)

    def _samples_all(self, sizes: BatchSizes) -> bool:
        """Whether the step has one sample per token, in order, so that no logits are selected.

        On a CPU selecting them wakes torch's threads, which then spin for milliseconds on cores
        that the compute threads use.
        """
        samples = self._buffers.sample_index[: sizes.num_samples]
        return np.array_equal(samples, np.arange(sizes.num_batched_tokens))

    def _is_adapted(self, sizes: BatchSizes) -> bool:
        """Whether a row of the step has an adapter."""
        if self._adapters is None:
            return False
        return bool((self._buffers.adapter_slots[: sizes.num_rows] >= 0).any())

    def _step_adapters(self, sizes: BatchSizes, more_index: Tensor | None) -> StepAdapters | None:
        """Adapters of the step's rows."""
        assert self._adapters is not None  # noqa: S101  # checked by the caller
        buffers, num_rows = self._buffers, sizes.num_rows
        ends = buffers.query_start[1 : num_rows + 1]
        token_slots = np.repeat(buffers.adapter_slots[:num_rows], np.diff(ends, prepend=0))
        tokens = buffers.adapter_rows(token_slots, "token")
        if not self._forward.selects_logits:  # its head computes every token
            return self._adapters.of_step(tokens)
        samples = buffers.sample_index[: sizes.num_samples]
        if more_index is not None:
            samples = np.concatenate((samples, more_index.numpy()))
        return self._adapters.of_step(tokens, buffers.adapter_rows(token_slots[samples], "sample"))

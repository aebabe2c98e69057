"""Runs the model on one step, the way that suits the step."""

import torch
from torch import Tensor

from pagedserve.runner.buffers import StepBuffers, StepSizes
from pagedserve.runner.forward import Forward
from pagedserve.runner.padded import PaddedDecode


class ModelRunner:
    """One model over one set of buffers and KV pools."""

    def __init__(
        self,
        forward: Forward,
        buffers: StepBuffers,
        block_size: int,
        padded: PaddedDecode | None = None,
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
        sizes: StepSizes,
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

"""Encoder of an encoder-decoder: states of the prompts that start in a step."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.attention.cross import CrossStep
from pagedserve.attention.metadata import BatchLayout
from pagedserve.models.encoder_decoder import encoder_states, no_states
from pagedserve.models.encoder_prompts import EncoderInput


class PromptEncoder:
    """Computes the encoder states of prompts, and the cross-attention inputs of a step."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Store the model."""
        self._model = model
        self._nothing = no_states(model)

    def encode(
        self, prompts: Mapping[int, EncoderInput]
    ) -> tuple[dict[int, Tensor], dict[int, str]]:
        """Compute the encoder states of prompts.

        Args:
            prompts: encoder inputs by row.

        Returns:
            The states ``[S, F]`` by row, and the error of each row that failed.
        """
        states, failed = {}, {}
        for row, prompt in prompts.items():
            try:
                states[row] = encoder_states(self._model, torch.as_tensor(prompt.inputs))
            except Exception as error:  # noqa: BLE001  # models raise many types
                failed[row] = f"its encoder input failed: {type(error).__name__}: {error}"
        return states, failed

    def of_step(
        self,
        layout: BatchLayout,
        lens: NDArray[np.int32],
        tables: NDArray[np.int32],
        states: Mapping[int, Tensor],
    ) -> CrossStep:
        """Cross-attention inputs of a step; see `CrossStep.of`."""
        return CrossStep.of(layout, lens, tables, states, self._nothing)

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
    """Computes encoder states of prompts, and keeps them until the step that writes their keys."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Start empty."""
        self._model = model
        self._nothing = no_states(model)
        self._encoded: dict[int, Tensor] = {}

    def encode(self, prompts: Mapping[int, EncoderInput]) -> None:
        """Compute the states of prompts, by row, for the next step."""
        self._encoded = {
            row: encoder_states(self._model, torch.as_tensor(prompt.inputs))
            for row, prompt in prompts.items()
        }

    def of_step(
        self, layout: BatchLayout, lens: NDArray[np.int32], tables: NDArray[np.int32]
    ) -> CrossStep:
        """Cross-attention inputs of the step; see `CrossStep.of`."""
        encoded, self._encoded = self._encoded, {}
        return CrossStep.of(layout, lens, tables, encoded, self._nothing)

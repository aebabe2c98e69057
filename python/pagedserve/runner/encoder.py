"""Encoder of an encoder-decoder: states of the prompts that start in a step."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.inputs.encoder_prompts import EncoderInput
from pagedserve.models.encoder_decoder import encoder_states


def encode_prompts(
    model: PreTrainedModel, prompts: Mapping[int, EncoderInput]
) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Compute the encoder states of prompts.

    Args:
        model: encoder-decoder.
        prompts: encoder inputs by row.

    Returns:
        The states ``[S, F]`` by row, and the error of each row that failed.
    """
    states, failed = {}, {}
    for row, prompt in prompts.items():
        try:
            states[row] = encoder_states(model, torch.as_tensor(prompt.inputs))
        except Exception as error:  # noqa: BLE001  # models raise many types
            failed[row] = f"its encoder input failed: {type(error).__name__}: {error}"
    return states, failed

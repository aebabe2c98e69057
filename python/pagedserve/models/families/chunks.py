"""Attention within chunks: layers pass the chunk size to our function.

The family's other layers scale queries by positions; they get those of the step.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.models.families.own_attention import Arguments, is_eager
from pagedserve.models.forward import current_context


class _GivenPositions:
    """Looks to an attention module like a cache with the tokens before each token."""

    def __init__(self, positions: Tensor) -> None:
        """Store the positions ``[T]`` of a flat batch."""
        self._seen = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, _: int) -> Tensor:
        """Number of tokens before each token of the batch: ``[T]``."""
        return self._seen

    def update(self, key: Tensor, value: Tensor, _: int) -> tuple[Tensor, Tensor]:
        """Return keys and values unchanged."""
        return key, value


def pass_chunks(model: PreTrainedModel) -> None:
    """Make a model's layers use chunked attention, and scale by the positions of the step."""

    def pass_on(module: Any, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
        if is_eager(model):
            return args, kwargs
        config = module.config
        if config.layer_types[module.layer_idx] == "chunked_attention":
            return args, kwargs | {"attention_chunk_size": config.attention_chunk_size}
        context = current_context()
        positions = None if context is None else context.positions
        given = None if positions is None else _GivenPositions(positions[0])
        return args, kwargs | {"past_key_values": given}

    for module in model.modules():
        if type(module).__name__.endswith("TextAttention"):
            module.register_forward_pre_hook(pass_on, with_kwargs=True)

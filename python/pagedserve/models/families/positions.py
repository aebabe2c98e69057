"""Positions of families that count them, or start them at another number.

In a flat batch, the index of a token is not its position.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedserve.models.forward import current_context


def embed_given_positions(model: PreTrainedModel) -> None:
    """Make a decoder that counts positions embed those of the forward pass."""
    for name, module in list(model.named_modules()):
        if name.endswith("decoder.embed_positions"):
            _embed_given(model, module)


def shift_positions(model: nn.Module, first: int) -> None:
    """Make a model count given positions from its first one; 0 changes nothing."""

    def shift(_: object, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        return args, kwargs if positions is None else kwargs | {"position_ids": positions + first}

    if first:
        model.register_forward_pre_hook(shift, with_kwargs=True)


def _embed_given(model: nn.Module, embedding: Any) -> None:
    """Make a position embedding use the positions of the forward pass."""
    embed = embedding.forward

    def drop(_: object, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs.pop("position_ids", None)
        return args, kwargs

    def forward(
        tokens: Any, past_key_values_length: int = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        context = current_context()
        given = None if context is None else context.positions
        positions = position_ids if given is None else given[0]
        embedded: Tensor = embed(tokens, past_key_values_length, position_ids=positions)
        return embedded

    model.register_forward_pre_hook(drop, with_kwargs=True)
    embedding.forward = forward

"""Architectures that compute positions themselves, or start them at another number.

In a flat batch, the index of a token is not its position.
"""

from typing import Any, Final

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.models.forward_context import current_context

# Their decoders compute positions instead of taking them.
_COUNTING: Final = frozenset(
    (
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "pegasus",
        "plbart",
        "whisper",
    )
)
# Their first position is the one after that of padding tokens.
_AFTER_PADDING: Final = frozenset(
    (
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    )
)


def first_position(config: PreTrainedConfig) -> int:
    """Position of a sequence's first token in the model's table of positions."""
    return config.pad_token_id + 1 if config.model_type in _AFTER_PADDING else 0


def hand_over_positions(model: PreTrainedModel) -> None:
    """Make one of these architectures use the positions it is given; leave others unchanged."""
    if model.config.model_type in _COUNTING:
        for name, module in list(model.named_modules()):
            if name.endswith("decoder.embed_positions"):
                _embed_given(model, module)
    first = first_position(model.config)
    if first:
        _shift_given(model, first)


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


def _shift_given(model: nn.Module, first: int) -> None:
    def shift(_: object, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        return args, kwargs if positions is None else kwargs | {"position_ids": positions + first}

    model.register_forward_pre_hook(shift, with_kwargs=True)

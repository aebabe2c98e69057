"""One call of a model on a flat batch, for a step of the engine or a check."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.models.forward_context import ForwardContext, forwarding


@dataclass(frozen=True, slots=True)
class StepImages:
    """Image inputs of a flat batch.

    Attributes:
        places: int64 ``[N]``, tokens in T whose embeddings are image features.
        features: ``[n, F]`` each, N in all.
        positions: int64 ``[3, 1, T]``, replacing those of the context; None leaves them.
    """

    places: Tensor
    features: Sequence[Tensor]
    positions: Tensor | None


def flat_batch_logits(
    model: PreTrainedModel,
    token_ids: Tensor,
    context: ForwardContext | None = None,
    index: Tensor | None = None,
    *,
    selects_logits: bool = True,
    images: StepImages | None = None,
) -> Tensor:
    """Run a model on the tokens of all rows of a step, one row after another.

    Args:
        model: model.
        token_ids: ``[1, T]``.
        context: attention, positions and the like; None uses the model's original attention.
        index: int ``[N]``, positions in T that need logits; None is all.
        selects_logits: whether the model can compute only the requested logits; else all are
            computed.
        images: image inputs of the rows; None for text only.

    Returns:
        Logits ``[N, V]``, in the model's dtype.
    """
    if context is not None and images is not None and images.positions is not None:
        context = replace(context, positions=images.positions)
    with forwarding(context):
        arguments: dict[str, Any] = {"input_ids": token_ids}
        if images is not None:
            arguments = {"inputs_embeds": _embedded(model, token_ids, images)}
        output = model(
            use_cache=False,
            logits_to_keep=0 if index is None else index,
            **arguments,
            **_positions(context),
        )
    logits = cast(Tensor, output.logits)[0]
    return logits if index is None or selects_logits else logits.index_select(0, index)


def flat_batch_hidden_states(
    model: PreTrainedModel,
    token_ids: Tensor,
    context: ForwardContext | None = None,
    token_types: Tensor | None = None,
) -> Tensor:
    """Run an encoder; return its last hidden states ``[T, F]``.

    Args:
        model: model.
        token_ids: ``[1, T]``.
        context: as in `flat_batch_logits`.
        token_types: ``[T]``, segment of each token of a text pair; None for single texts.
    """
    arguments = _positions(context)
    if token_types is not None:
        arguments["token_type_ids"] = token_types[None]
    with forwarding(context):
        output = model(input_ids=token_ids.long(), **arguments)
    return cast(Tensor, output.last_hidden_state)[0]


def decoder_logits(model: PreTrainedModel, token_ids: Tensor, context: ForwardContext) -> Tensor:
    """Run a decoder with encoder states; return its logits ``[T, V]``.

    Args:
        model: model.
        token_ids: ``[1, T]``.
        context: attention, positions and encoder states.
    """
    assert context.encoder_states is not None  # noqa: S101  # of encoder-decoders
    with forwarding(context):
        output = model(
            encoder_outputs=(context.encoder_states[None],),
            decoder_input_ids=token_ids,
            use_cache=False,
            **_positions(context),
        )
    return cast(Tensor, output.logits)[0]


def _positions(context: ForwardContext | None) -> dict[str, Any]:
    """Positions as arguments of a model."""
    given = None if context is None else context.positions
    return {} if given is None else {"position_ids": given}


def _embedded(model: PreTrainedModel, token_ids: Tensor, images: StepImages) -> Tensor:
    """Embeddings ``[1, T, F]`` of tokens, with image features in place of image tokens."""
    embedding: Any = model.get_input_embeddings()
    embeddings: Tensor = embedding(token_ids)
    start = 0
    for features in images.features:
        places = images.places[start : start + len(features)]
        embeddings[0].index_copy_(0, places, features.to(embeddings.dtype))
        start += len(features)
    return embeddings

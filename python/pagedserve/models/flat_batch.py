"""One call of a model on a flat batch, for a step of the engine or a check."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StepImages:
    """Image inputs of a flat batch.

    Attributes:
        places: int64 ``[N]``, tokens in T whose embeddings are image features.
        features: ``[n, F]`` each, N in all.
        positions: int64 ``[3, 1, T]``, replacing those of the batch; None leaves them.
    """

    places: Tensor
    features: Sequence[Tensor]
    positions: Tensor | None


def flat_batch_logits(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor | None = None,
    index: Tensor | None = None,
    *,
    selects_logits: bool = True,
    images: StepImages | None = None,
) -> Tensor:
    """Run a model on the tokens of all rows of a step, one row after another.

    Args:
        model: model; the current handler serves its attention calls.
        token_ids: ``[1, T]``.
        positions: ``[1, T]``; None lets the model compute them.
        index: int ``[N]``, positions in T that need logits; None is all.
        selects_logits: whether the model can compute only the requested logits; else all are
            computed.
        images: image inputs of the rows; None for text only.

    Returns:
        Logits ``[N, V]``, in the model's dtype.
    """
    arguments: dict[str, Any] = {"input_ids": token_ids}
    if images is not None:
        arguments = {"inputs_embeds": _embedded(model, token_ids, images)}
        positions = positions if images.positions is None else images.positions
    if positions is not None:
        arguments["position_ids"] = positions
    output = model(
        use_cache=False,
        logits_to_keep=0 if index is None else index,
        **arguments,
    )
    logits = cast(Tensor, output.logits)[0]
    return logits if index is None or selects_logits else logits.index_select(0, index)


def flat_batch_hidden_states(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor | None = None,
    token_types: Tensor | None = None,
) -> Tensor:
    """Run an encoder; return its last hidden states ``[T, F]``.

    Args:
        model: model; the current handler serves its attention calls.
        token_ids: ``[1, T]``.
        positions: ``[1, T]``; None lets the model compute them.
        token_types: ``[T]``, segment of each token of a text pair; None for single texts.
    """
    arguments = {} if positions is None else {"position_ids": positions}
    if token_types is not None:
        arguments["token_type_ids"] = token_types[None]
    output = model(input_ids=token_ids.long(), **arguments)
    return cast(Tensor, output.last_hidden_state)[0]


def decoder_logits(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, states: Tensor
) -> Tensor:
    """Run a decoder with encoder states; return its logits ``[T, V]``.

    Args:
        model: model; the current handler serves its attention calls.
        token_ids: ``[1, T]``.
        positions: ``[1, T]``.
        states: ``[S, F]``, states of the encoder.
    """
    output = model(
        encoder_outputs=(states[None],),
        decoder_input_ids=token_ids,
        position_ids=positions,
        use_cache=False,
    )
    return cast(Tensor, output.logits)[0]


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

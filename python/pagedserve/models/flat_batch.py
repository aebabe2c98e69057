"""One call of a model on a flat batch: what a step of the engine and what a check runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StepImages:
    """What images mean to a flat batch.

    Attributes:
        places: int64 ``[N]``, the tokens in T whose embeddings are features of images.
        features: ``[n, F]`` each, N in all.
        positions: int64 ``[3, 1, T]``, in the place of those of the batch; None leaves them.
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
    """Run a model on the tokens of all rows of a step, one after another.

    Args:
        model: answers its attention calls by whatever handler is in place.
        token_ids: ``[1, T]``.
        positions: ``[1, T]``; None lets the model count.
        index: int ``[N]``, positions in T whose logits are wanted; None wants all.
        selects_logits: whether the model computes those logits alone when it is told which; one
            that does not computes all of them.
        images: of the rows; None for text alone.

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
    """The last states ``[T, F]`` of an encoder.

    Args:
        model: answers its attention calls by whatever handler is in place.
        token_ids: ``[1, T]``.
        positions: ``[1, T]``; None lets the model count.
        token_types: ``[T]``, which of two texts each token is of; None where there is one.
    """
    arguments = {} if positions is None else {"position_ids": positions}
    if token_types is not None:
        arguments["token_type_ids"] = token_types[None]
    output = model(input_ids=token_ids.long(), **arguments)
    return cast(Tensor, output.last_hidden_state)[0]


def decoder_logits(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, states: Tensor
) -> Tensor:
    """Logits ``[T, V]`` of a decoder behind an encoder.

    Args:
        model: answers its attention calls by whatever handler is in place.
        token_ids: ``[1, T]``.
        positions: ``[1, T]``.
        states: ``[S, F]``, of the encoder.
    """
    output = model(
        encoder_outputs=(states[None],),
        decoder_input_ids=token_ids,
        position_ids=positions,
        use_cache=False,
    )
    return cast(Tensor, output.logits)[0]


def _embedded(model: PreTrainedModel, token_ids: Tensor, images: StepImages) -> Tensor:
    """Embeddings ``[1, T, F]`` of tokens, those of images being their features."""
    embedding: Any = model.get_input_embeddings()
    embeddings: Tensor = embedding(token_ids)
    start = 0
    for features in images.features:
        places = images.places[start : start + len(features)]
        embeddings[0].index_copy_(0, places, features.to(embeddings.dtype))
        start += len(features)
    return embeddings

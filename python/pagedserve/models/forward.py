"""A forward pass of a model on a flat batch, for a step of the engine or a check.

transformers' models pass few arguments on to all of their modules, so the inputs of a step that
only some modules know are a forward context: one context variable, set around the call of the
model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from pagedserve.attention.interface import AttentionHandler, PagedAttention
from pagedserve.errors import StepError
from pagedserve.models.adapters import StepAdapters
from pagedserve.models.states import StateHandler


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """Inputs of one forward pass over a flat batch of T tokens.

    Attributes:
        attention: serves the attention calls; it has the layout of the rows, which differs between
            layers with separate blocks.
        positions: int64 ``[1, T]``, or ``[3, 1, T]`` for models that count in three dimensions;
            None lets the model compute them.
        adapters: rows of the adapters; None if no row has one, so that each module with adapters
            costs only a check.
        states: loads and stores recurrent states; None for models without.
        encoder_states: ``[S, F]``, encoder states for cross-attention; None for models without.
    """

    attention: AttentionHandler
    positions: Tensor | None = None
    adapters: StepAdapters | None = None
    states: StateHandler | None = None
    encoder_states: Tensor | None = None


_current: ContextVar[ForwardContext | None] = ContextVar("pagedserve_forward", default=None)


@contextmanager
def forwarding(context: ForwardContext | None) -> Iterator[None]:
    """A scope in which modules read this context; None runs a model as transformers does."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def current_context() -> ForwardContext | None:
    """Context of the forward pass in progress; None outside of `forwarding`."""
    return _current.get()


def current_adapters() -> StepAdapters | None:
    """Adapter rows of the forward pass in progress; None without adapters."""
    context = _current.get()
    return None if context is None else context.adapters


def current_step() -> PagedAttention:
    """Attention of the step in progress, for layers that attend over its pools directly.

    Raises:
        StepError: outside of `forwarding`, or without pools.
    """
    context = _current.get()
    if context is None or not isinstance(context.attention, PagedAttention):
        raise StepError("a fused layer was called outside of a step of the model runner")
    return context.attention


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

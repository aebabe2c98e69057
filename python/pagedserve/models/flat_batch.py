"""One call of a model on a flat batch: what a step of the engine and what a check runs."""

from typing import cast

from torch import Tensor
from transformers import PreTrainedModel


def flat_batch_logits(
    model: PreTrainedModel,
    token_ids: Tensor,
    positions: Tensor | None = None,
    index: Tensor | None = None,
    *,
    selects_logits: bool = True,
) -> Tensor:
    """Run a model on the tokens of all rows of a step, one after another.

    Args:
        model: answers its attention calls by whatever handler is in place.
        token_ids: ``[1, T]``.
        positions: ``[1, T]``; None lets the model count.
        index: int ``[N]``, positions in T whose logits are wanted; None wants all.
        selects_logits: whether the model computes those logits alone when it is told which; one
            that does not computes all of them.

    Returns:
        Logits ``[N, V]``, in the model's dtype.
    """
    arguments = {} if positions is None else {"position_ids": positions}
    output = model(
        input_ids=token_ids,
        use_cache=False,
        logits_to_keep=0 if index is None else index,
        **arguments,
    )
    logits = cast(Tensor, output.logits)[0]
    return logits if index is None or selects_logits else logits.index_select(0, index)


def flat_batch_hidden_states(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor | None = None
) -> Tensor:
    """The last states ``[T, F]`` of an encoder.

    Args:
        model: answers its attention calls by whatever handler is in place.
        token_ids: ``[1, T]``.
        positions: ``[1, T]``; None lets the model count.
    """
    arguments = {} if positions is None else {"position_ids": positions}
    output = model(input_ids=token_ids.long(), **arguments)
    return cast(Tensor, output.last_hidden_state)[0]

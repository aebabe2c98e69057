"""The attention function that transformers' models call.

It is registered under the name ``"pagedserve"``, and no mask function is, so the models create no
masks.  The handler of its calls is in the forward context, because not every model passes keyword
arguments on to the function.
"""

from typing import Any, Final

from torch import Tensor, nn
from transformers import AttentionInterface

from pagedserve.attention.interface import AttentionCall
from pagedserve.attention.metadata import AttentionOptions
from pagedserve.errors import StepError, UnsupportedModelError
from pagedserve.models.forward import current_context

ATTENTION_NAME: Final = "pagedserve"

# Arguments that change attention and that paged attention does not support: biases are slopes here,
# models have tensors of them.
_UNKNOWN_ARGUMENTS = ("indices", "block_indices", "head_mask", "alibi")


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention; transformers calls it once per layer.

    Args:
        module: the attention module.
        query: ``[1, H, T, D]``.
        key: ``[1, Hkv, T, D]``.
        value: ``[1, Hkv, T, Dv]``.
        attention_mask: passed on to the handler.
        scaling: factor of the scores; None is ``D ** -0.5``.
        **kwargs: supported are ``sliding_window``, ``attention_chunk_size``, ``softcap``,
            ``s_aux``, ``alibi_slopes`` and ``position_bias``; the last is ``[1, H, T, T]``, or
            ``[H, N]`` by distance.

    Returns:
        ``([1, T, H, Dv], None)``.

    Raises:
        UnsupportedModelError: an argument is not supported.
        StepError: outside of a forward pass with a context.
    """
    for name in _UNKNOWN_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name!r} to attention: paged attention knows "
                "sliding_window, softcap, s_aux, alibi_slopes and position_bias only"
            )
    context = current_context()
    if context is None:
        raise StepError("paged attention was called outside of a step of the model runner")
    bias: Tensor | None = kwargs.get("position_bias")
    is_listed = bias is not None and bias.dim() == 2  # noqa: PLR2004  # [H, N]
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        alibi=kwargs.get("alibi_slopes"),
        position_bias=bias if is_listed else None,
    )
    call = AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        options=options,
        has_window="sliding_window" in kwargs,
        chunk=kwargs.get("attention_chunk_size"),
        mask=attention_mask,
        position_bias=None if is_listed else bias,
    )
    return context.attention.answer(call).unsqueeze(0), None


def register() -> None:
    """Register the function with transformers; idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)

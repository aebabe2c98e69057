"""The attention function that transformers' models call, and the handler that answers the calls.

One function is registered under the name ``"pagedserve"``, and no mask function, so the models make
no masks.  The handler of a forward is a context variable, because not every model passes keyword
arguments on to the function.  A layer is known by the ordinal of its call, because some models
number their layers twice or not at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from pagedserve.attention.chunks import in_chunks
from pagedserve.attention.metadata import AttentionMetadata, AttentionOptions, WriteAndAttend
from pagedserve.errors import StepError, UnsupportedModelError

ATTENTION_NAME = "pagedserve"

# Arguments that change what a model attends to, and that paged attention does not know: biases are
# slopes here, models have tensors of them.
_UNKNOWN_ARGUMENTS = ("indices", "block_indices", "head_mask", "alibi")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one layer hands to the attention function.

    Attributes:
        query: ``[1, H, T, D]``.
        key: ``[1, Hkv, T, D]``.
        value: ``[1, Hkv, T, Dv]``.
        options: scale, window, cap, sinks and slopes.
        has_window: whether the layer named a window, be it None.
        chunk: positions of a chunk, where a query sees its own chunk only; else None.
        mask: the mask object, None unless a mask function was registered.
        position_bias: ``[1, H, T, T]``, what is added to the scores; None where nothing is, or it
            is listed by distance in ``options``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: AttentionOptions
    has_window: bool
    chunk: int | None
    mask: object
    position_bias: Tensor | None = None


class AttentionHandler(Protocol):
    """Answers the attention calls of one forward."""

    def answer(self, call: AttentionCall) -> Tensor:
        """Returns ``[T, H, Dv]``."""


_handler: ContextVar[AttentionHandler] = ContextVar("pagedserve_attention_handler")


@contextmanager
def answering(handler: AttentionHandler) -> Iterator[None]:
    """Let the handler answer every attention call in this context."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


class LayerStep(NamedTuple):
    """What one layer reads in a step: its pool, its window, and the rows over its blocks."""

    pool: Tensor
    window: int | None
    metadata: AttentionMetadata


class PagedAttention:
    """Answers the calls of one step from the KV pools, the n-th call from the n-th pool."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        pools: Sequence[Tensor],
        windows: Sequence[int | None],
        write_and_attend: WriteAndAttend,
        *,
        causal: bool = True,
        by_window: Mapping[int, AttentionMetadata] | None = None,
    ) -> None:
        """Take a step.

        Args:
            metadata: the step.
            pools: of each layer, ``[num_blocks, block_size, Hkv, D + Dv]``; the layout of a block
                is the backend's own.
            windows: of each layer, as the probe found them.
            write_and_attend: the backend's; the same for all steps over one set of pools.
            causal: whether a token sees no key behind its own.
            by_window: the step over blocks of their own, for layers with such a window.
        """
        self._metadata = metadata
        self._by_window = by_window or {}
        self._write_and_attend = write_and_attend
        self._pools = pools
        self._windows = windows
        self._causal = causal
        self.num_calls = 0

    def next_layer(self) -> LayerStep:
        """What the layer reads that attends next.

        Raises:
            StepError: if all layers have attended.
        """
        layer = self.num_calls
        if layer == len(self._pools):
            raise StepError(f"the model made more attention calls than its {layer} layers")
        self.num_calls += 1
        window = self._windows[layer]
        metadata = self._metadata if window is None else self._by_window.get(window, self._metadata)
        return LayerStep(self._pools[layer], window, metadata)

    def answer(self, call: AttentionCall) -> Tensor:
        """Write the call's keys and values, then attend.

        Raises:
            UnsupportedModelError: if the model made a mask of its own.
        """
        if call.mask is not None:
            raise UnsupportedModelError(
                "the model hands a mask of its own to attention: paged attention is causal, with "
                "a sliding window at most"
            )
        if call.position_bias is not None:
            raise UnsupportedModelError(
                "the model adds a bias of its own to each score: paged attention knows slopes, and "
                "biases that are listed by distance"
            )
        pool, window, metadata = self.next_layer()
        options = call.options
        if options.window != window or not self._causal:
            options = replace(options, window=window, causal=self._causal)
        return self._write_and_attend(
            call.query,
            call.key,
            call.value,
            pool,
            metadata=metadata if call.chunk is None else in_chunks(metadata, call.chunk),
            options=options,
        )


def current_step() -> PagedAttention:
    """The step in progress, for layers that write and attend by themselves.

    Raises:
        StepError: outside of `answering`, or where no pools are.
    """
    handler = _handler.get(None)
    if not isinstance(handler, PagedAttention):
        raise StepError("a fused layer was called outside of a step of the model runner")
    return handler


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
    """The function that transformers calls once a layer.

    Args:
        module: the attention module.
        query: ``[1, H, T, D]``.
        key: ``[1, Hkv, T, D]``.
        value: ``[1, Hkv, T, Dv]``.
        attention_mask: handed on to the handler.
        scaling: factor of the scores; None is ``D ** -0.5``.
        **kwargs: ``sliding_window``, ``attention_chunk_size``, ``softcap``, ``s_aux``,
            ``alibi_slopes`` and ``position_bias`` are understood; the last is ``[1, H, T, T]``, or
            ``[H, N]`` listed by distance.

    Returns:
        ``([1, T, H, Dv], None)``.

    Raises:
        UnsupportedModelError: for an argument that paged attention does not know.
        StepError: outside of `answering`.
    """
    for name in _UNKNOWN_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name!r} to attention: paged attention knows "
                "sliding_window, softcap, s_aux, alibi_slopes and position_bias only"
            )
    handler = _handler.get(None)
    if handler is None:
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
        query=query,
        key=key,
        value=value,
        options=options,
        has_window="sliding_window" in kwargs,
        chunk=kwargs.get("attention_chunk_size"),
        mask=attention_mask,
        position_bias=None if is_listed else bias,
    )
    return handler.answer(call).unsqueeze(0), None


def register() -> None:
    """Make the function known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)

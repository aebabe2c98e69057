"""Forward context: what the modules of a model read in a forward pass besides their arguments.

transformers' models pass few arguments on to all of their modules, so the inputs of a step that
only some modules know are one context variable, set around the call of the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

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

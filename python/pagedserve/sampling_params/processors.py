"""Logits processors, which a request may bring: their types, and those that take the prompt."""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Floats: TypeAlias = NDArray[np.floating]

# Of tensors where torch runs the model, of numpy arrays where it does not.
LogitsProcessor: TypeAlias = (
    "Callable[[list[int], Tensor], Tensor] | Callable[[list[int], Floats], Floats]"
)
AnyLogitsProcessor: TypeAlias = (
    "LogitsProcessor | Callable[[list[int], list[int], Tensor], Tensor]"
    " | Callable[[list[int], list[int], Floats], Floats]"
)

_NUM_WITH_PROMPT: Final = 3
_NONE: Final = inspect.Parameter.empty
_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def with_prompt(
    processors: tuple[LogitsProcessor, ...], token_ids: Sequence[int]
) -> tuple[LogitsProcessor, ...]:
    """Bind the prompt to the processors with three arguments, the first of which it is."""
    if not any(map(_takes_prompt, processors)):
        return processors
    prompt = list(token_ids)
    return tuple(
        _bound(processor, prompt) if _takes_prompt(processor) else processor
        for processor in processors
    )


def _takes_prompt(processor: LogitsProcessor) -> bool:
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    required = [each for each in parameters if each.kind in _POSITIONAL and each.default is _NONE]
    return len(required) == _NUM_WITH_PROMPT


def _bound(processor: Any, prompt: list[int]) -> LogitsProcessor:
    def bound(token_ids: list[int], logits: "Tensor") -> "Tensor":
        changed: Tensor = processor(prompt, token_ids, logits)
        return changed

    bound.__name__ = getattr(processor, "__name__", type(processor).__name__)
    return bound

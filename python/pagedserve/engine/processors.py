"""Logits processors of an engine, which other packages bring."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from pagedserve.errors import ConfigError, RequestError
from pagedserve.models.load.model_properties import ModelConfig
from pagedserve.plugins import object_of
from pagedserve.sampling_params import LogitsProcessor, SamplingParams

_GROUP: Final = "pagedserve.logits_processors"
# Returns the logits processor of a request; None if it needs none.
_METHOD: Final = "new_req_logits_processor"

# Objects with the method.
ProcessorFactory: TypeAlias = Any
# Result of the method, by vLLM's name; a real type, which annotations of scripts evaluate.
RequestLogitsProcessor: TypeAlias = Callable[..., Any]


class AdapterLogitsProcessor:
    """Base of classes that are written for vLLM and give each request its logits processor."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Accept vLLM's arguments.

        Args:
            vllm_config: Object with the engine's ``model_config``.
            device: The model's device, of torch.
            is_pin_memory: False.
        """

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ``ValueError`` for parameters that are refused."""

    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token stays so; without effect here."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the logits processor of a request; None if it needs none."""
        raise NotImplementedError


def load_processors(given: Sequence[str | type]) -> tuple[type[ProcessorFactory], ...]:
    """Find the classes that the option ``logits_processors`` names.

    Args:
        given: Each ``module:Class``, the name of an entry point, or a class.

    Raises:
        ConfigError: A class does not exist or lacks the method.
    """
    return tuple(_found(each) for each in given)


def _found(given: str | type) -> type[ProcessorFactory]:
    kind = object_of("logits_processors", given, _GROUP) if isinstance(given, str) else given
    if not isinstance(kind, type) or not callable(getattr(kind, _METHOD, None)):
        raise ConfigError(
            f"logits_processors has {given!r}, which is {kind!r}; it must be a class with the "
            f"method {_METHOD}"
        )
    return kind


def create_processors(
    kinds: Sequence[type[ProcessorFactory]], model: ModelConfig
) -> tuple[ProcessorFactory, ...]:
    """Create an object of each class: vLLM's with its arguments, others without any.

    Args:
        kinds: The classes.
        model: Properties of the model, for vLLM's.

    Raises:
        ConfigError: A class cannot be created.
    """
    return tuple(_create(kind, model) for kind in kinds)


def _create(kind: type[ProcessorFactory], model: ModelConfig) -> ProcessorFactory:
    try:
        if issubclass(kind, AdapterLogitsProcessor):
            return kind(SimpleNamespace(model_config=model), model.device, False)
        return kind()
    except Exception as error:
        raise ConfigError(
            f"logits_processors has '{kind.__module__}:{kind.__qualname__}', which cannot be "
            f"created: {type(error).__name__}: {error}"
        ) from error


def with_processors(
    params: SamplingParams, factories: Sequence[ProcessorFactory]
) -> SamplingParams:
    """Add the logits processors of an engine after those of a request.

    Raises:
        RequestError: One of them raises an error, or returns what cannot be called; or
            ``extra_args`` that none of them can read.
    """
    if params.extra_args and not factories:
        raise RequestError(
            f"extra_args is {params.extra_args!r}; it must be left out: the engine has no "
            "logits_processors, which would read it",
            param="extra_args",
        )
    found: list[LogitsProcessor] = []
    for factory in factories:
        name = type(factory).__name__
        try:
            if isinstance(factory, AdapterLogitsProcessor):
                factory.validate_params(params)
            processor = getattr(factory, _METHOD)(params)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            raise RequestError(f"logits processor {name} raised {fault}") from error
        if processor is not None and not callable(processor):
            raise RequestError(f"logits processor {name} returned {processor!r} for the request")
        found += [] if processor is None else [processor]
    if not found:
        return params
    params = params.clone()
    params.logits_processors = (*params.logits_processors, *found)
    return params

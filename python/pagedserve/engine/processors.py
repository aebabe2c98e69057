"""Logits processors of an engine, which other packages bring."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from pagedserve.errors import ConfigError, RequestError
from pagedserve.plugins import object_of
from pagedserve.sampling_params import LogitsProcessor, SamplingParams

_GROUP: Final = "pagedserve.logits_processors"
# Returns the logits processor of a request; None if it needs none.
_METHOD: Final = "new_req_logits_processor"

# Objects with the method.
ProcessorFactory: TypeAlias = Any


def load_processors(names: Sequence[str]) -> tuple[ProcessorFactory, ...]:
    """Create the objects that the option ``logits_processors`` names, each without arguments.

    Args:
        names: Each ``module:Class``, or the name of an entry point.

    Raises:
        ConfigError: A class does not exist, cannot be created, or lacks the method.
    """
    return tuple(_create(name) for name in names)


def _create(name: str) -> ProcessorFactory:
    kind = object_of("logits_processors", name, _GROUP)
    if not isinstance(kind, type) or not callable(getattr(kind, _METHOD, None)):
        raise ConfigError(
            f"logits_processors has {name!r}, which is {kind!r}; it must be a class with the "
            f"method {_METHOD}"
        )
    try:
        return kind()
    except Exception as error:
        raise ConfigError(
            f"logits_processors has {name!r}, which cannot be created: "
            f"{type(error).__name__}: {error}"
        ) from error


def with_processors(
    params: SamplingParams, factories: Sequence[ProcessorFactory]
) -> SamplingParams:
    """Add the logits processors of an engine after those of a request.

    Raises:
        RequestError: One of them raises an error, or returns what cannot be called.
    """
    found: list[LogitsProcessor] = []
    for factory in factories:
        name = type(factory).__name__
        try:
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

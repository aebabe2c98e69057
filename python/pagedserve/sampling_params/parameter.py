"""A sampling parameter, written once: a field of ``SamplingOptions`` with its check and texts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    SupportsFloat,
    SupportsIndex,
    TypeAlias,
    TypeVar,
)

from pagedserve.checks import Check
from pagedserve.config.options import Concern, Option
from pagedserve.sampling_params.processors import AnyLogitsProcessor, LogitsProcessor
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams

_Accepted = TypeVar("_Accepted")
_Held = TypeVar("_Held")
_Plain = TypeVar("_Plain")


class Checked(Generic[_Accepted, _Held, _Plain]):
    """Type of a field that accepts one type, holds another, and is documented as a third.

    Type checkers see a descriptor.  At run time it is the third type, which documentation, requests
    to a server and the command line have.
    """

    def __class_getitem__(cls, types: tuple[Any, Any, Any]) -> Any:
        """Return the plain type."""
        return types[2]

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> _Held: ...

        def __set__(self, instance: object, value: _Accepted) -> None: ...


Integer: TypeAlias = Checked[SupportsIndex, int, int]
OptionalInteger: TypeAlias = Checked[SupportsIndex | None, int | None, int | None]
Real: TypeAlias = Checked[SupportsFloat, float, float]
Strings: TypeAlias = Checked[Iterable[str] | None, tuple[str, ...], list[str]]
StopStrings: TypeAlias = Checked[str | Iterable[str] | None, tuple[str, ...], str | list[str]]
TokenIds: TypeAlias = Checked[Iterable[SupportsIndex] | None, tuple[int, ...], list[int]]
OptionalTokenIds: TypeAlias = Checked[
    Iterable[SupportsIndex] | None, tuple[int, ...] | None, list[int]
]
Biases: TypeAlias = Checked[
    Mapping[int, SupportsFloat] | Iterable[tuple[int, float]] | None,
    tuple[tuple[int, float], ...],
    dict[int, float],
]
ExtraArgs: TypeAlias = Checked[
    Mapping[str, Any] | None, dict[str, Any] | None, dict[str, Any] | None
]
Processors: TypeAlias = Checked[
    "Iterable[AnyLogitsProcessor] | None", tuple[LogitsProcessor, ...], list[Callable[..., Any]]
]
Format: TypeAlias = Checked[
    StructuredOutputsParams | Mapping[str, Any] | None,
    StructuredOutputsParams | None,
    StructuredOutputsParams | dict[str, Any],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter(Option):
    """Properties of a sampling parameter besides its field's type and default.

    Attributes:
        off: Values that switch its part in random sampling off, the first for messages; empty if
            it has no part.  A beam search requires one of them.
        recommended_as: Key of a model's generation_config.json that may set it; None if none does.
        request: Field of requests to a server: "same" has the name and the plain type of the
            parameter, "own" is one that the server declares, whose type or limits differ or which
            it reads, and "none" is none.
        flag: Help of its option on the command line; None if it has none.
    """

    off: tuple[object, ...] = ()
    recommended_as: str | None = None
    request: Literal["same", "own", "none"] = "same"
    flag: str | None = None


def parameter(
    default: object, check: Check[object], text: str, *, concern: Concern, **more: Any
) -> Any:
    """A dataclass field that is a sampling parameter.

    Args:
        default: Value of a parameter that is not given.
        check: Attribute of ``Parameter``, as ``text``, ``concern`` and ``more`` are.
        text: See ``Option``.
        concern: See ``Option``.
        **more: Further attributes of ``Parameter``.
    """
    known = Parameter(check=check, text=text, concern=concern, **more)
    return field(default=default, metadata={"option": known})

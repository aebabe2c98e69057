"""Tools of the Responses API, and those of them that the model is shown."""

import logging
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag

from pagedserve.errors import RequestError
from pagedserve.server.fields import NullsLeftOut
from pagedserve.server.tools.fields import Function, Grammar, TextFormat

logger = logging.getLogger(__name__)

# Characters of the name of a tool that the model is shown.
_MAX_NAME_CHARS: Final = 256


class ResponseFunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class ResponseGrammarFormat(Grammar):
    """Text that a grammar describes."""

    type: Literal["grammar"]


class ResponseCustomTool(NullsLeftOut):
    """A tool whose input is a text."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["custom"]
    name: str = Field(min_length=1, max_length=_MAX_NAME_CHARS)
    description: str | None = None
    format: TextFormat | ResponseGrammarFormat = Field(
        default_factory=TextFormat, discriminator="type"
    )


CallableTool: TypeAlias = Annotated[
    ResponseFunctionTool | ResponseCustomTool, Field(discriminator="type")
]


class NamespaceTool(NullsLeftOut):
    """Functions and custom tools under a name, such as those of an MCP server."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=_MAX_NAME_CHARS)
    description: str | None = None
    tools: list[CallableTool]


class OtherTool(NullsLeftOut):
    """A tool of OpenAI's servers or of an unknown type, which the model is not shown."""

    model_config = ConfigDict(extra="ignore")

    type: str = Field(max_length=_MAX_NAME_CHARS)


KnownTool: TypeAlias = Annotated[
    ResponseFunctionTool | ResponseCustomTool | NamespaceTool, Field(discriminator="type")
]
# Fields that a function of a response has, null if it was sent without.
_REQUIRED: Final[dict[str, Any]] = {"parameters": None, "strict": None}
_TYPES: Final = frozenset({"function", "custom", "namespace"})


def _kind_of(given: Any) -> str | None:
    """The ``type`` of a tool, ``other`` for those that are left out; None if it is no string."""
    found = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    if not isinstance(found, str):
        return None
    return found if found in _TYPES else "other"


Tool: TypeAlias = Annotated[
    Annotated[ResponseFunctionTool, Tag("function")]
    | Annotated[ResponseCustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_kind_of),
]


def returned_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """Return the tools of a response: those that are not left out, as they were sent.

    Clients require the parameters and ``strict`` of a function, and take null for no other field.
    """
    return [
        (_REQUIRED if isinstance(tool, ResponseFunctionTool) else {})
        | tool.model_dump(exclude_none=True)
        for tool in tools
        if not isinstance(tool, OtherTool)
    ]


@cache
def log_left_out() -> None:
    """Log, once, that tools are left out."""
    logger.info(
        "tools of other types than function, custom and namespace are left out of requests: this "
        "server does not run them"
    )


def name_of(tool: Tool) -> str:
    """Name of a tool or a namespace; of others the type."""
    return tool.type if isinstance(tool, OtherTool) else tool.name


def shown_name(namespace: str | None, name: str) -> str:
    """Name of a tool that the model is shown, with its namespace."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def shown_tools(tools: Iterable[Tool]) -> list[CallableTool]:
    """Return the tools that the model is shown, those of namespaces under their whole names.

    Raises:
        RequestError: Such a name is too long.
    """
    found: list[CallableTool] = []
    for tool in tools:
        if isinstance(tool, OtherTool):
            log_left_out()
            continue
        if not isinstance(tool, NamespaceTool):
            found.append(tool)
            continue
        for inner in tool.tools:
            name = shown_name(tool.name, inner.name)
            if len(name) > _MAX_NAME_CHARS:
                raise RequestError(
                    f"tools has {name!r:.80} with {len(name)} characters; with its namespace a "
                    f"name may have {_MAX_NAME_CHARS}",
                    param="tools",
                )
            found.append(inner.model_copy(update={"name": name}))
    return found


def names_of_calls(tools: Iterable[Tool]) -> dict[str, dict[str, str]]:
    """Fields ``name`` and ``namespace`` of calls of tools in namespaces, by the name shown."""
    return {
        shown_name(tool.name, inner.name): {"name": inner.name, "namespace": tool.name}
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for inner in tool.tools
    }

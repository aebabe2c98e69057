"""Tools and tool choices within request bodies.

A tool is a function, whose arguments are a JSON object, or a custom tool, whose input is a text.
To the model both are functions (`pagedserve.server.tools.custom`).
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag

from pagedserve.errors import RequestError
from pagedserve.server.fields import NullsLeftOut
from pagedserve.server.tools.custom import described, schema_of_input
from pagedserve.server.tools.schemas import check_parameters

# Without parameters a tool has no arguments, as at OpenAI, if its schema is closed.
_NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "properties": {}}


class Function(NullsLeftOut):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(NullsLeftOut):
    """A tool whose arguments are a JSON object."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = "function"
    function: Function

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.name

    @property
    def parameters(self) -> dict[str, Any]:
        """Schema of the arguments."""
        found = self.function.parameters
        return _NO_ARGUMENTS if found is None else found

    @property
    def is_strict(self) -> bool:
        """Whether keywords that grammars do not enforce are refused."""
        return bool(self.function.strict)

    def for_template(self) -> dict[str, Any]:
        """Definition of the function for a chat template."""
        return self.model_dump(exclude_none=True)


class Grammar(NullsLeftOut):
    """A grammar in Lark's syntax, or a regular expression."""

    model_config = ConfigDict(extra="forbid")

    syntax: Literal["lark", "regex"]
    definition: str


class TextFormat(NullsLeftOut):
    """Any text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"] = "text"


class GrammarFormat(NullsLeftOut):
    """Text that a grammar describes."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["grammar"]
    grammar: Grammar


class Custom(NullsLeftOut):
    """A custom tool that the model may call."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    format: TextFormat | GrammarFormat = Field(default_factory=TextFormat, discriminator="type")


class CustomTool(NullsLeftOut):
    """A tool whose input is a text.

    Attributes:
        is_strict: As of a function.
    """

    model_config = ConfigDict(extra="forbid")

    type: Literal["custom"]
    custom: Custom
    is_strict: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.custom.name

    @property
    def grammar(self) -> Grammar | None:
        """Grammar of the input; None if any text is accepted."""
        given = self.custom.format
        return given.grammar if isinstance(given, GrammarFormat) else None

    @property
    def lark(self) -> str | None:
        """Grammar of the input in Lark's syntax; None if it has none."""
        return self._definition("lark")

    @property
    def parameters(self) -> dict[str, Any]:
        """Schema of the arguments, which has the input; a Lark grammar is not part of it."""
        return schema_of_input(self._definition("regex"))

    def _definition(self, syntax: str) -> str | None:
        grammar = self.grammar
        return None if grammar is None or grammar.syntax != syntax else grammar.definition

    def for_template(self) -> dict[str, Any]:
        """Definition of a function for a chat template."""
        grammar = self.grammar
        text = None if grammar is None else described(grammar.syntax, grammar.definition)
        shown = "\n\n".join(filter(None, (self.custom.description, text)))
        description = {"description": shown} if shown else {}
        function = {"name": self.name, **description, "parameters": schema_of_input(None)}
        return {"type": "function", "function": function}


def _kind_of(given: Any) -> str:
    """The ``type`` of a tool or of a choice, which one of a function may lack."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "custom" if kind == "custom" else "function"


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")],
    Discriminator(_kind_of),
]


def check_names(tools: Sequence[Tool]) -> None:
    """Refuse tools of one name.

    Raises:
        RequestError: Two tools have it.
    """
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("tools has two tools of one name", param="tools")


def check_usable(tools: Iterable[Tool]) -> None:
    """Refuse tools for which no arguments are valid.

    Raises:
        RequestError: The first of them.
    """
    for tool in tools:
        check_parameters(tool.name, tool.parameters)


def lark_inputs(tools: Iterable[Tool]) -> dict[str, str]:
    """Grammars of inputs in Lark's syntax, by the name of the tool."""
    customs = (tool for tool in tools if isinstance(tool, CustomTool))
    return {tool.name: tool.lark for tool in customs if tool.lark is not None}


class ToolName(NullsLeftOut):
    """Name of the tool that must be called."""

    model_config = ConfigDict(extra="forbid")

    name: str


class NamedFunction(NullsLeftOut):
    """A tool choice that names a function."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: ToolName

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.name


class NamedCustomTool(NullsLeftOut):
    """A tool choice that names a custom tool."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["custom"]
    custom: ToolName

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.custom.name


NamedTool: TypeAlias = NamedFunction | NamedCustomTool


class AllowedTools(NullsLeftOut):
    """Tools that may be called, and whether one of them must be."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolChoice(NullsLeftOut):
    """A tool choice among some of the tools."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"] = "allowed_tools"
    allowed_tools: AllowedTools

"""Tools of a request, and what an answer says of them and of thoughts."""

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from pagedserve.errors import RequestError
from pagedserve.server.fields import NamedToolChoice
from pagedserve.server.protocol import ChatBody
from pagedserve.server.tag_stream import Parts, TagStream
from pagedserve.server.tool_formats import (
    Call,
    ReasoningFormat,
    Schemas,
    ToolFormat,
    read_json,
)
from pagedserve.structured_outputs import StructuredOutputsParams

_ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}
# Where the definitions of a schema are, which others of it refer to from its root.
_DEFINITIONS: Final = ("$defs", "definitions")
# A list of objects, which is all there is: what an answer that must call a tool is held to.
_REQUIRED: Final = ToolFormat(read=read_json, bare_starts=("[",))


def check_tools(body: ChatBody) -> None:
    """Refuse a choice of tools that are not there.

    Raises:
        RequestError: What is missing.
    """
    names = [tool.function.name for tool in body.tools or ()]
    choice = body.tool_choice
    if len(set(names)) < len(names):
        raise RequestError("tools has two functions of one name", param="tools")
    if choice == "required" and not names:
        raise RequestError("tool_choice is 'required' without tools", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        known = ", ".join(names) or "none"
        raise RequestError(
            f"tool_choice names {choice.function.name!r}; tools has {known}", param="tool_choice"
        )


def schemas_of(body: ChatBody) -> Schemas:
    """The schema of each tool's arguments."""
    tools = body.usable_tools
    return {tool.function.name: tool.function.parameters or _ANY_ARGUMENTS for tool in tools}


def forced_by_choice(body: ChatBody) -> StructuredOutputsParams | None:
    """What the text must be where a tool must be called: its arguments, or a list of calls."""
    schemas = schemas_of(body)
    if isinstance(body.tool_choice, NamedToolChoice):
        schema = dict(schemas[body.tool_choice.function.name])
    elif body.tool_choice == "required":
        schema = _list_of_calls(schemas, several=body.parallel_tool_calls)
    else:
        return None
    return StructuredOutputsParams(
        json=json.dumps(schema), disable_any_whitespace=True, given_as="tools"
    )


def _list_of_calls(schemas: Schemas, *, several: bool) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    shared: dict[str, dict[str, Any]] = {}
    for name, schema in schemas.items():
        parameters = dict(schema)
        for key in _DEFINITIONS:
            shared[key] = shared.get(key, {}) | parameters.pop(key, {})
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    most = {} if several else {"maxItems": 1}
    definitions = {key: entries for key, entries in shared.items() if entries}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **definitions}


@dataclass(slots=True)
class Reading:
    """How one choice of an answer is read, and what came of it.

    Attributes:
        named: The tool that all text is the arguments of.
        num_calls: Calls so far.
    """

    stream: TagStream
    named: str | None = None
    num_calls: int = 0


@dataclass(slots=True, kw_only=True)
class AnswerReader:
    """Reads the choices of an answer: thoughts, content, calls.

    Attributes:
        body: The request.
        tools: How the model writes calls where it may choose to; None where nobody knows.
        reasoning: How it writes thoughts; None where they stay in the content.
        is_reasoning: Whether the prompt ends within thoughts.
    """

    body: ChatBody
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    is_reasoning: bool = False
    _readings: dict[int, Reading] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """Whether anything but content can come."""
        return bool(self.reasoning or self.body.usable_tools)

    @property
    def tags(self) -> tuple[str, ...]:
        """What texts must show for that."""
        thoughts = () if self.reasoning is None else (self.reasoning.start, self.reasoning.end)
        calls = self.tools.starts if self.tools is not None and self.body.usable_tools else ()
        return thoughts + calls

    def begin_behind(self, prompt: str) -> None:
        """Take the prompt's text: where it ends within thoughts, the answer begins there."""
        if self.reasoning is not None:
            self.is_reasoning = prompt.rstrip().endswith(self.reasoning.start)

    def fields(self, index: int, text: str, *, is_last: bool, is_delta: bool) -> dict[str, Any]:
        """What the next text of a choice is to a message, by the names of its fields.

        Args:
            index: Of the choice.
            text: All of it, or what is new.
            is_last: Whether no more comes.
            is_delta: Whether it goes into a stream.
        """
        reading = self._readings.get(index) or self._readings.setdefault(index, self._begin())
        if reading.named is not None:
            calls = [self._named_call(reading, text, is_delta=is_delta)]
            return {"tool_calls": calls} if is_delta else {"content": None, "tool_calls": calls}
        parts = reading.stream.feed(text, is_last=is_last)
        fields: dict[str, Any] = {}
        if parts.reasoning and self.body.include_reasoning:
            # The names of vLLM, and of DeepSeek's own interface.
            fields["reasoning"] = fields["reasoning_content"] = parts.reasoning
        if calls := self._calls(reading, parts, is_delta=is_delta):
            fields["tool_calls"] = calls
        if parts.content:
            fields["content"] = parts.content
        elif not is_delta:
            fields["content"] = None if calls else ""
        return fields

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        """Why a choice ended, as OpenAI says it: a tool that was named ends it as any text does."""
        reading = self._readings.get(index)
        has_calls = reading is not None and reading.named is None and reading.num_calls > 0
        return "tool_calls" if reason == "stop" and has_calls else reason

    def _begin(self) -> Reading:
        choice = self.body.tool_choice
        if isinstance(choice, NamedToolChoice):
            return Reading(TagStream(None, {}), choice.function.name)
        is_bound = choice == "required"
        tools = _REQUIRED if is_bound else self.tools
        return Reading(
            TagStream(
                tools if self.body.usable_tools else None,
                schemas_of(self.body),
                None if is_bound else self.reasoning,
                is_reasoning=self.is_reasoning,
            )
        )

    def _calls(self, reading: Reading, parts: Parts, *, is_delta: bool) -> list[dict[str, Any]]:
        calls = parts.calls
        if not self.body.parallel_tool_calls:
            calls = calls[: max(0, 1 - reading.num_calls)]
        shown = []
        for call in calls:
            index = {"index": reading.num_calls} if is_delta else {}
            shown.append(index | self._shown(call))
            reading.num_calls += 1
        return shown

    def _named_call(self, reading: Reading, text: str, *, is_delta: bool) -> dict[str, Any]:
        """The arguments of the tool that was named, as far as they came."""
        is_first, reading.num_calls = reading.num_calls == 0, 1
        if not is_first:
            return {"index": 0, "function": {"arguments": text}}
        return ({"index": 0} if is_delta else {}) | self._shown(Call(reading.named or "", text))

    def _shown(self, call: Call) -> dict[str, Any]:
        length = self.tools.id_length if self.tools is not None else None
        name = uuid.uuid4().hex
        return {
            "id": f"call_{name[:24]}" if length is None else name[:length],
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

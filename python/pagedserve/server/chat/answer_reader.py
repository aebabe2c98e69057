"""Tools of a request, and the parsing of tool calls and reasoning in its response."""

import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final

from pagedserve.config.reasoning import ReasoningFormat
from pagedserve.errors import RequestError
from pagedserve.inputs.chat import text_of_content
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.http.bounds import MAX_ID_CHARS, check_schema
from pagedserve.server.tools.beside_json import grammar_beside_json, is_told_from_calls
from pagedserve.server.tools.custom import InputReader
from pagedserve.server.tools.fields import (
    AllowedToolChoice,
    CustomTool,
    NamedTool,
    check_names,
    check_usable,
    lark_inputs,
)
from pagedserve.server.tools.formats import ToolFormat
from pagedserve.server.tools.generic import HELD_HEAD, grammar_of_calls
from pagedserve.server.tools.grammar_calls import FORCED_HEAD, GrammarCalls
from pagedserve.server.tools.readers import Call, Parts, Schemas
from pagedserve.server.tools.schemas import schema_of_arguments, schema_of_calls
from pagedserve.server.tools.tag_stream import TagStream

# Any text.
_TEXT: Final = "(?s:.*)"
# Number of tool names that an error lists.
_MAX_SHOWN: Final = 16


def check_tools(body: ChatBody) -> None:
    """Refuse a choice of unknown tools, and invalid tools.

    Raises:
        RequestError: A tool is missing or invalid.
    """
    tools = body.tools or ()
    check_names(tools)
    names = [tool.name for tool in tools]
    known = set(names)
    if body.choice == "required" and not names:
        raise RequestError("tool_choice is 'required' without tools", param="tool_choice")
    unknown = next((name for name in _chosen_names(body) if name not in known), None)
    if unknown is not None:
        more = [f"and {len(names) - _MAX_SHOWN} more"] if len(names) > _MAX_SHOWN else []
        shown = ", ".join(names[:_MAX_SHOWN] + more) or "none"
        raise RequestError(
            f"tool_choice names {unknown!r:.80}; tools has {shown}", param="tool_choice"
        )
    check_usable(body.usable_tools)


def _chosen_names(body: ChatBody) -> list[str]:
    """Names of tools in the tool choice."""
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return [choice.name]
    if isinstance(choice, AllowedToolChoice):
        return [tool.name for tool in choice.allowed_tools.tools]
    return []


def schemas_of(body: ChatBody) -> Schemas:
    """Schema of each tool's arguments."""
    return {tool.name: tool.parameters for tool in body.usable_tools}


def _held_schemas(body: ChatBody) -> Schemas:
    """Schema of each tool's arguments, to be enforced.

    Raises:
        RequestError: A schema is too large.
    """
    verbatim = lark_inputs(body.usable_tools)
    schemas = {name: schema for name, schema in schemas_of(body).items() if name not in verbatim}
    check_schema("tools", schemas, body.num_bytes)
    return schemas


def forced_by_choice(
    body: ChatBody, known: ToolFormat | None = None, *, closes: bool = True
) -> StructuredOutputsParams | None:
    """Structured outputs of a forced tool choice: the arguments or the input, or calls.

    Args:
        body: The request.
        known: Tool call format; None if it is unknown.
        closes: Whether arguments are only those that the schemas name.

    Raises:
        RequestError: The schemas cannot be enforced.
    """
    named = _custom_tool(body, body.choice)
    if named is not None:
        return _whole_input(named)
    if _is_generic(body, known):
        return _held_calls(body, closes=closes)
    schema = _forced_schema(body)
    if schema is None:
        return None
    return StructuredOutputsParams(
        json=schema,
        disable_any_whitespace=True,
        disable_additional_properties=closes,
        given_as="tools",
    )


def _forced_schema(body: ChatBody) -> dict[str, Any] | None:
    if isinstance(body.choice, NamedTool):
        schema = schemas_of(body)[body.choice.name]
        check_schema("tools", schema, body.num_bytes)
        return schema_of_arguments(schema)
    if body.choice == "required":
        return schema_of_calls(_held_schemas(body), several=body.parallel_tool_calls)
    return None


def _is_generic(body: ChatBody, known: ToolFormat | None) -> bool:
    """Whether calls are required, in the generic format, and not as a list in JSON.

    The prompt describes it, and the next turn writes the calls so; a list has no Lark grammar.
    """
    is_described = known is not None and known.is_generic
    return body.choice == "required" and (is_described or bool(lark_inputs(body.usable_tools)))


def _held_calls(
    body: ChatBody, answer: Mapping[str, Any] | bool | None = None, *, closes: bool
) -> StructuredOutputsParams:
    """Structured outputs of calls in the generic format, or of a text where none is required."""
    grammar = grammar_of_calls(
        _held_schemas(body),
        answer,
        inputs=lark_inputs(body.usable_tools),
        several=body.parallel_tool_calls,
        is_strict=any(tool.is_strict for tool in body.usable_tools),
        is_required=body.choice == "required",
    )
    return StructuredOutputsParams(
        grammar=grammar, disable_additional_properties=closes, given_as="tools"
    )


def _custom_tool(body: ChatBody, named: object) -> CustomTool | None:
    """The custom tool that a choice names; None if it is none."""
    name = named.name if isinstance(named, NamedTool) else named
    found = (tool for tool in body.usable_tools if isinstance(tool, CustomTool))
    return next((tool for tool in found if tool.name == name), None)


def _whole_input(tool: CustomTool) -> StructuredOutputsParams:
    """Structured outputs of a text that is the input of a custom tool."""
    if tool.lark is not None:
        return StructuredOutputsParams(grammar=tool.lark, given_as="tools")
    regex = _TEXT if tool.grammar is None else tool.grammar.definition
    return StructuredOutputsParams(regex=regex, given_as="tools")


def held_by_format(
    body: ChatBody,
    known: ToolFormat | None,
    text: StructuredOutputsParams | None = None,
    *,
    token_ids: Collection[Sequence[int]] = (),
    closes: bool = True,
) -> StructuredOutputsParams | None:
    """Structured outputs of calls that the model chooses: in the generic format, or beside JSON.

    Args:
        body: The request.
        known: Tool call format; None if it is unknown.
        text: Structured outputs of a text without calls; None accepts any text.
        token_ids: Token ids of the format's start tags that consist of added tokens.
        closes: Whether arguments are only those that the schemas name.

    Raises:
        RequestError: The schemas cannot be enforced.
    """
    if known is None or not is_chosen_by_model(body):
        return None
    if text is not None and text.kind != "json":  # it alone holds the text
        return None
    answer = None if text is None else _answer_schema(text)
    if known.is_generic:
        return _held_calls(body, answer, closes=closes)
    if text is None or answer is None:
        return None
    return StructuredOutputsParams(
        grammar=grammar_beside_json(answer, known, schemas_of(body), token_ids),
        disable_any_whitespace=text.disable_any_whitespace,
        disable_additional_properties=text.disable_additional_properties,
        given_as=text.given_as,
    )


def _answer_schema(text: StructuredOutputsParams) -> dict[str, Any] | bool:
    """Schema of a text that is JSON; any object has any properties, though tools are closed."""
    if text.json_object:
        return {"type": "object", "additionalProperties": True}
    schema: dict[str, Any] | bool = json.loads(text.definition)
    return schema


def is_chosen_by_model(body: ChatBody) -> bool:
    """Whether the model decides if it calls a tool."""
    return bool(body.usable_tools) and body.choice == "auto"


def check_text_of_tools(
    body: ChatBody, text: StructuredOutputsParams | None, known: ToolFormat | None
) -> None:
    """Refuse automatic tool choice if the text must be JSON, which cannot contain a call.

    Other formats, a regular expression or a grammar, may describe calls.  There is a grammar of
    either: a text that is JSON by ``response_format``, or calls that do not begin as it does.

    Raises:
        RequestError: Tools and JSON are given.
    """
    if text is None or text.kind != "json" or not is_chosen_by_model(body):
        return
    is_format = text.given_as == "response_format"
    if known is None or not is_format or not is_told_from_calls(_answer_schema(text), known):
        raise RequestError(
            f"{text.named} is given with tools that the model may choose, and a text that must be "
            "JSON holds no call: give tool_choice 'none' for a text, 'required' or a name for a "
            "call",
            param=text.given_as,
        )


@dataclass(slots=True)
class Reading:
    """Parser state of one choice.

    Attributes:
        named: Tool whose arguments or input are the whole text, but for reasoning before it.
        before: Parser of the reasoning before a forced call; None if none is separated.
        has_begun: Whether anything has followed that reasoning.
        read_input: Reads the input of the last call from its text; None of a function.
        num_calls: Calls so far.
        call_ids: Ids of these calls.
        is_cut: Whether the last call ended before its arguments were complete.
    """

    stream: TagStream | GrammarCalls
    named: str | None = None
    before: TagStream | None = None
    has_begun: bool = False
    read_input: Callable[[str], str] | None = None
    num_calls: int = 0
    call_ids: set[str] = field(default_factory=set)
    is_cut: bool = False


@dataclass(slots=True, kw_only=True)
class AnswerReader:
    """Parses the choices of a response: reasoning, content, tool calls.

    Attributes:
        body: The request.
        tools: Tool call format; None if it is unknown.
        reasoning: Reasoning format; None if reasoning stays in the content.
        is_reasoning: Whether the text starts within reasoning.
        may_reason: Whether it may without a start tag, if texts of the format do: a grammar that
            alone holds it has no such text.
        is_held: Whether a grammar holds the calls that the model chooses to their form.
        is_json: Whether ``response_format`` requires JSON of a text without calls.
    """

    body: ChatBody
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    is_reasoning: bool = False
    may_reason: bool = True
    is_held: bool = False
    is_json: bool = False
    _readings: dict[int, Reading] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """Whether anything but content can occur."""
        return bool(self.reasoning or self.body.usable_tools)

    @property
    def tags(self) -> tuple[str, ...]:
        """Special tokens that the text must keep for parsing."""
        thoughts = () if self.reasoning is None else (self.reasoning.start, self.reasoning.end)
        if self.tools is None or not self.body.usable_tools:
            return thoughts
        end = () if self.tools.end is None else (self.tools.end,)
        return thoughts + self.tools.starts + end

    def begin_behind(self, prompt: str) -> None:
        """Set whether the response starts within reasoning, from the prompt's text."""
        known, body = self.reasoning, self.body
        if known is not None and body.continue_final_message:
            self.is_reasoning = known.is_open_in(text_of_content(body.messages[-1].get("content")))
        elif known is not None:
            self.is_reasoning = bool(known.is_open_after(prompt, may_begin=self.may_reason))

    def fields(self, index: int, text: str, *, is_last: bool, is_delta: bool) -> dict[str, Any]:
        """Fields of a message for the next text of a choice.

        Args:
            index: Index of the choice.
            text: Whole text, or the new part.
            is_last: Whether it is the end of the text.
            is_delta: Whether it is a delta of a stream.
        """
        if not self.is_needed:
            return {"content": text}
        reading = self._readings.get(index) or self._readings.setdefault(index, self._begin())
        if reading.before is None:
            return self._fields(reading, text, is_last=is_last, is_delta=is_delta)
        before = reading.before.feed(text, is_last=is_last)
        reading.has_begun |= bool(before.content)
        fields = self._reasoning(before.reasoning)
        if reading.has_begun:
            return fields | self._fields(
                reading, before.content, is_last=is_last, is_delta=is_delta
            )
        return fields if is_delta else fields | {"content": ""}

    def _reasoning(self, text: str) -> dict[str, Any]:
        if not text or not self.body.include_reasoning:
            return {}
        return {"reasoning": text}

    def _fields(
        self, reading: Reading, text: str, *, is_last: bool, is_delta: bool
    ) -> dict[str, Any]:
        """Fields of the next text of a choice, after the reasoning before a forced call."""
        if reading.named is not None:
            if reading.num_calls and not text:  # some clients read it as another call
                return {}
            calls = [self._named_call(reading, text, is_delta=is_delta)]
            return {"tool_calls": calls} if is_delta else {"content": None, "tool_calls": calls}
        parts = reading.stream.feed(text, is_last=is_last)
        reading.is_cut = parts.is_cut
        fields = self._reasoning(parts.reasoning)
        if calls := self._calls(reading, parts, is_delta=is_delta):
            fields["tool_calls"] = calls
        if parts.content:
            fields["content"] = parts.content
        elif not is_delta:
            fields["content"] = None if calls else ""
        return fields

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        """Finish reason in OpenAI's terms: a named tool choice ends as plain text does.

        So does a stop string within the arguments of a call.
        """
        reading = self._readings.get(index)
        if reason != "stop" or reading is None or reading.named is not None or reading.is_cut:
            return reason
        return "tool_calls" if reading.num_calls else reason

    def _begin(self) -> Reading:
        choice = self.body.choice
        begin = partial(TagStream, reasoning=self.reasoning, is_reasoning=self.is_reasoning)
        before = None if self.reasoning is None else begin(None, {})
        if isinstance(choice, NamedTool):
            return Reading(TagStream(None, {}), choice.name, before=before)
        if choice == "required":
            head = HELD_HEAD if _is_generic(self.body, self.tools) else FORCED_HEAD
            return Reading(GrammarCalls(head), before=before)
        tools = self.tools if self.body.usable_tools else None
        held_head = HELD_HEAD if self.is_held else None
        stream = begin(tools, schemas_of(self.body), held_head=held_head, is_either=self.is_json)
        return Reading(stream)

    def _calls(self, reading: Reading, parts: Parts, *, is_delta: bool) -> list[dict[str, Any]]:
        calls = parts.calls
        if not self.body.parallel_tool_calls:
            calls = calls[: max(0, 1 - reading.num_calls)]
        shown = [_continued(reading, parts.more_arguments)] if parts.more_arguments else []
        for call in calls:
            is_custom = _custom_tool(self.body, call.name) is not None
            reading.read_input = InputReader().feed if is_custom else None
            index = {"index": reading.num_calls} if is_delta else {}
            shown.append(index | self._shown(reading, call))
            reading.num_calls += 1
        return shown

    def _named_call(self, reading: Reading, text: str, *, is_delta: bool) -> dict[str, Any]:
        """The arguments or the input of the named tool, as far as generated."""
        if reading.num_calls:
            return _continued(reading, text)
        if _custom_tool(self.body, reading.named) is not None:
            reading.read_input = str
        shown = self._shown(reading, Call(reading.named or "", text))
        reading.num_calls = 1
        return ({"index": 0} if is_delta else {}) | shown

    def _shown(self, reading: Reading, call: Call) -> dict[str, Any]:
        ((kind, part),) = _text_of_call(reading, call.arguments).items()
        call_id = call.call_id
        if not call_id or call_id in reading.call_ids:
            call_id = self._new_id(reading, call.name)
        reading.call_ids.add(call_id)
        return {
            "id": call_id,
            "type": kind,
            kind: {"name": call.name, **part},
        }

    def _new_id(self, reading: Reading, name: str) -> str:
        if self.tools is not None and self.tools.names_in_ids:
            listed = (message.get("tool_calls") for message in self.body.messages)
            earlier = sum(len(calls) for calls in listed if isinstance(calls, list))
            ids = (f"functions.{name}:{number}" for number in count(earlier + reading.num_calls))
            named = next(call_id for call_id in ids if call_id not in reading.call_ids)
            if len(named) <= MAX_ID_CHARS:  # else no client could send it back
                return named
        length = None if self.tools is None else self.tools.id_length
        unique = uuid.uuid4().hex
        return f"call_{unique[:24]}" if length is None else unique[:length]


def _continued(reading: Reading, arguments: str) -> dict[str, Any]:
    """Delta that continues the last call."""
    return {"index": reading.num_calls - 1, **_text_of_call(reading, arguments)}


def _text_of_call(reading: Reading, arguments: str) -> dict[str, dict[str, str]]:
    """The next text of the last call, by the type of its tool."""
    if reading.read_input is None:
        return {"function": {"arguments": arguments}}
    return {"custom": {"input": reading.read_input(arguments)}}

"""Tools on a model whose chat template shows none: the generic format of tool calls.

Tools are described in the system message, in the words of Hermes and Qwen.  Calls of earlier turns
are part of the assistant's text, as the model wrote them, and the results of tools are messages of
the user.  A grammar holds each call to the schema of its tool once it begins.  The input of a tool
with a Lark grammar is written as it is, after an object with the name alone.

Invariants:

1. After its first call a response has only further calls, and none after an input that is written
   as it is.
2. The next turn renders a call with the separators of the grammar, so that prefix caching finds it.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pagedserve.errors import RequestError
from pagedserve.server.tools.custom import InputReader
from pagedserve.server.tools.grammar_calls import END, JSON_NAME
from pagedserve.server.tools.readers import Schemas
from pagedserve.server.tools.schemas import schema_of_call, schema_of_object

if TYPE_CHECKING:  # it imports numpy, and the options of the server name the format
    from pagedserve.inputs.chat import Conversation, Message

START: Final = "<tool_call>"

_SYSTEM_ROLES: Final = ("system", "developer")
_INSTRUCTIONS: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_INPUTS: Final = """

To call {names}, write the input as it is, without JSON, after the function name, as your last call:
<tool_call>
{{"name": <function-name>}}
<input>
</tool_call>"""
# JSON as ``json.dumps`` writes it.
_JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_CALL: Final = rf"""call: "\n" %json {{schema}} "\n{END}"
"""
# The name is JSON here too: of two lexemes with one prefix the lexer follows only the longer.
# The input may have any text, the end of a call as well, which therefore may be left out.
_INPUT: Final = rf"""{{rule}}: "\n" %json {{name}} "\n" %lark {{{{
{{grammar}}
}}}} "\n{END}"?
"""
_FREE_TEXT: Final = rf"""opened[lazy]: TEXT "{START}"
TEXT: /(?s:.*)/"""
_JSON_TEXT: Final = f'opened: "{START}"'
# Text before the arguments of a call, including the end of the previous call.
HELD_HEAD: Final = re.compile(
    rf"\s*(?:(?:\}}\s*{END}\s*)?{START})?\s*{JSON_NAME}"
    r'(?:,\s*"arguments"\s*:\s*(?=\{)|(?P<verbatim>\}\n))'
)


def grammar_of_calls(
    schemas: Schemas,
    answer: Mapping[str, Any] | bool | None = None,
    *,
    inputs: Mapping[str, str] | None = None,
    several: bool,
    is_strict: bool = False,
    is_required: bool = False,
) -> str:
    """Lark grammar of a text, and after it of calls that are valid for their tools.

    Args:
        schemas: Schemas of the tools whose calls are JSON.
        answer: Schema of a text, which is then JSON and has no calls after it; None is any text.
        inputs: Lark grammars of the tools whose input is written as it is; of both together at
            least one.
        several: Whether there may be more than one call.
        is_strict: Whether keywords that grammars do not enforce are refused; else they are left to
            the model.
        is_required: Whether there is no text, but calls alone.

    Raises:
        RequestError: Two tools have different schemas with the same ``$id``.
    """
    rules, last = "", []
    if schemas:
        schema = schema_of_call(schemas, key="arguments")
        schema["x-guidance"] = {**_JSON_OPTIONS, "lenient": not is_strict}
        rules += _CALL.format(schema=json.dumps(schema))
        last.append('call "\\n"?')
    for number, (name, grammar) in enumerate((inputs or {}).items()):
        last.append(f"input_{number}")
        named = {**schema_of_object({"name": {"const": name}}), "x-guidance": _JSON_OPTIONS}
        rules += _INPUT.format(rule=last[-1], name=json.dumps(named), grammar=grammar)
    calls = f"({' | '.join(last)})"
    if several and schemas:
        calls = f'(call "\\n"? "{START}")* {calls}'
    if is_required:
        return f'start: "{START}" {calls}\n{rules}'
    text, opened = "TEXT", _FREE_TEXT
    if answer is not None:
        held = {**answer, "x-guidance": _JSON_OPTIONS} if isinstance(answer, Mapping) else answer
        text, opened = f"%json {json.dumps(held)}", _JSON_TEXT
    return f"start: {text} | opened {calls}\n{opened}\n{rules}"


def plain_conversation(
    messages: "Conversation",
    tools: Sequence[Mapping[str, Any]],
    verbatim: Collection[str] = (),
    *,
    has_system: bool,
) -> "list[Message]":
    """Convert a conversation with tools for a template that shows none.

    Args:
        messages: Messages in OpenAI's format; those without tools are returned unchanged.
        tools: Tool definitions to describe.
        verbatim: Names of those whose input is written as it is.
        has_system: Whether the template shows a system message; else the first message of the user
            has the descriptions.

    Raises:
        RequestError: A tool call of a message has no name.
    """
    plain: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            plain.append({"role": "user", "content": _result(message.get("content"))})
        elif message.get("role") == "assistant" and isinstance(message.get("tool_calls"), list):
            plain.append(_with_text_of_calls(message, verbatim))
        else:
            plain.append(message)
    merged = _merged(messages, plain)
    if not tools:
        return merged
    return _described(merged, _description(tools, verbatim), has_system=has_system)


def _description(tools: Sequence[Mapping[str, Any]], verbatim: Collection[str]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=listed)
    return text + _INPUTS.format(names=", ".join(verbatim)) if verbatim else text


def _described(messages: "list[Message]", text: str, *, has_system: bool) -> "list[Message]":
    """Add the description of tools to a conversation."""
    if not has_system:
        roles = [message.get("role") for message in messages]
        first = roles.index("user") if "user" in roles else 0
        described = {**messages[first], "content": _joined(text, messages[first].get("content"))}
        return [*messages[:first], described, *messages[first + 1 :]]
    if messages[0].get("role") in _SYSTEM_ROLES:
        described = {**messages[0], "content": _joined(messages[0].get("content"), text)}
        return [described, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _merged(messages: "Conversation", plain: "Sequence[Message]") -> "list[Message]":
    """Merge each result of a tool with the one before: templates may require that roles alternate.

    Args:
        messages: Messages in OpenAI's format.
        plain: The same, converted.
    """
    merged: list[Message] = []
    is_result = False
    for given, message in zip(messages, plain, strict=True):
        if is_result and message.get("role") == "user":
            before = merged.pop()
            content = _joined(before.get("content"), message.get("content"), "\n")
            merged.append({**before, "content": content})
        else:
            merged.append(message)
        is_result = given.get("role") == "tool"
    return merged


def _result(content: object) -> Any:
    return _joined(_joined("<tool_response>", content, "\n"), "</tool_response>", "\n")


def _with_text_of_calls(message: "Message", verbatim: Collection[str]) -> "Message":
    """Convert the calls of a message to text after its content."""
    calls = "\n".join(_text_of_call(call, verbatim) for call in message["tool_calls"])
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _joined(message.get("content"), calls, "\n")}


def _text_of_call(call: object, verbatim: Collection[str]) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"tool_calls of a message has {call!r:.80}; it must be an object like "
            '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}',
            param="messages",
        )
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    if function["name"] in verbatim:
        return f'{START}\n{{"name": {name}}}\n{InputReader().feed(text)}\n{END}'
    return f'{START}\n{{"name": {name}, "arguments": {text}}}\n{END}'


def _joined(first: Any, second: Any, separator: str = "\n\n") -> Any:
    """Join two contents, each a text, a list of parts, or None."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{separator}{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)

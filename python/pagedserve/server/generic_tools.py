"""Tools on a model whose chat template shows none: the generic format of tool calls.

Tools are described in the system message, in the words of Hermes and Qwen.  Calls of earlier turns
are part of the assistant's text, as the model wrote them, and the results of tools are messages of
the user.  A grammar holds each call to the schema of its tool once it begins.

Invariants:

1. After its first call a response has only further calls.
2. The next turn renders a call with the separators of the grammar, so that prefix caching finds it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pagedserve.errors import RequestError
from pagedserve.server.grammar_calls import JSON_NAME
from pagedserve.server.tool_readers import Schemas
from pagedserve.server.tool_schemas import schema_of_call

if TYPE_CHECKING:  # it imports numpy, and the options of the server name the format
    from pagedserve.inputs.chat import Conversation, Message

START: Final = "<tool_call>"
END: Final = "</tool_call>"

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
# JSON as ``json.dumps`` writes it.
_JSON_OPTIONS: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_GRAMMAR: Final = r"""start: {text} | opened call{more} "\n"?
{opened}
call: "\n" %json {schema} "\n{end}"
"""
_FREE_TEXT: Final = rf"""opened[lazy]: TEXT "{START}"
TEXT: /(?s:.*)/"""
_JSON_TEXT: Final = f'opened: "{START}"'
# Text before the arguments of a call, including the end of the previous call.
HELD_HEAD: Final = re.compile(
    rf'\s*(?:(?:\}}\s*{END}\s*)?{START})?\s*{JSON_NAME}"arguments"\s*:\s*(?=\{{)'
)
_MORE: Final = rf' ("\n"? "{START}" call)*'


def grammar_of_calls(
    schemas: Schemas,
    answer: Mapping[str, Any] | bool | None = None,
    *,
    several: bool,
    is_strict: bool = False,
) -> str:
    """Lark grammar of a text, and after it of calls that are valid for their tools.

    Args:
        schemas: Schemas of the tools; at least one.
        answer: Schema of a text, which is then JSON and has no calls after it; None is any text.
        several: Whether there may be more than one call.
        is_strict: Whether keywords that grammars do not enforce are refused; else they are left to
            the model.

    Raises:
        RequestError: Two tools have different schemas with the same ``$id``.
    """
    schema = schema_of_call(schemas, key="arguments")
    schema["x-guidance"] = {**_JSON_OPTIONS, "lenient": not is_strict}
    more = _MORE if several else ""
    text, opened = "TEXT", _FREE_TEXT
    if answer is not None:
        held = {**answer, "x-guidance": _JSON_OPTIONS} if isinstance(answer, Mapping) else answer
        text, opened = f"%json {json.dumps(held)}", _JSON_TEXT
    return _GRAMMAR.format(text=text, opened=opened, end=END, schema=json.dumps(schema), more=more)


def plain_conversation(
    messages: "Conversation", tools: Sequence[Mapping[str, Any]], *, has_system: bool
) -> "list[Message]":
    """Convert a conversation with tools for a template that shows none.

    Args:
        messages: Messages in OpenAI's format; those without tools are returned unchanged.
        tools: Tool definitions to describe.
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
            plain.append(_with_text_of_calls(message))
        else:
            plain.append(message)
    merged = _merged(messages, plain)
    return _described(merged, tools, has_system=has_system) if tools else merged


def _described(
    messages: "list[Message]", tools: Sequence[Mapping[str, Any]], *, has_system: bool
) -> "list[Message]":
    """Add the descriptions of tools to a conversation."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=listed)
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


def _with_text_of_calls(message: "Message") -> "Message":
    """Convert the calls of a message to text after its content."""
    calls = "\n".join(map(_text_of_call, message["tool_calls"]))
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _joined(message.get("content"), calls, "\n")}


def _text_of_call(call: object) -> str:
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

"""Custom tools, whose input is a text: to the model, functions with that text as their argument.

A regular expression of the input is part of the schema of the arguments, and so holds a call
wherever a grammar holds those of functions.  A grammar of Lark describes the text itself, which
JSON would escape: wherever a grammar holds calls, such an input is written as it is.

Costs: each character of the arguments is examined once, however they are split.
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pagedserve.errors import RequestError
from pagedserve.server.tools.schemas import schema_of_object

if TYPE_CHECKING:  # it imports numpy, and the options of the server name the tools' formats
    from pagedserve.inputs.chat import Conversation, Message

_INPUT: Final = "input"
# Arguments with an input, before and after its text.
INPUT_START: Final = f'{{"{_INPUT}": "'
INPUT_END: Final = '"}'
_OPENING: Final = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
# Text of a string in JSON, up to its end or to an escape that is incomplete: half of a pair of
# surrogates is, unless what follows is no other half.
_CONTENT: Final = re.compile(
    r'(?:[^"\\]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u])"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\[^u])*+"
)


def schema_of_input(regex: str | None) -> dict[str, Any]:
    """Schema of the arguments of a custom tool.

    Args:
        regex: Regular expression of the whole input; None accepts any text.
    """
    held = {} if regex is None else {"pattern": f"^(?:{regex})$"}
    return schema_of_object({_INPUT: {"type": "string", **held}})


def input_part(text: str) -> str:
    """Part of an input, between ``INPUT_START`` and ``INPUT_END``."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def described(syntax: str, definition: str) -> str:
    """Description of a grammar for the model."""
    named = "this grammar in Lark's syntax" if syntax == "lark" else "this regular expression"
    return f"The input must match {named}:\n{definition}"


def with_functions(messages: "Conversation") -> "list[Message]":
    """Convert the calls of custom tools in a conversation to those of functions.

    Raises:
        RequestError: A call has no name, or an input that is no text.
    """
    return [
        {**message, "tool_calls": [_as_function(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _as_function(call: Any) -> Any:
    if not isinstance(call, Mapping) or call.get("type") != "custom":
        return call
    custom = call.get("custom")
    given = custom if isinstance(custom, Mapping) else {}
    name, text = given.get("name"), given.get(_INPUT)
    if not isinstance(name, str) or not isinstance(text, str):
        raise RequestError(
            f"tool_calls of a message has {call!r:.80}; it must be an object like "
            '{"id": "...", "type": "custom", "custom": {"name": "...", "input": "..."}}',
            param="messages",
        )
    arguments = json.dumps({_INPUT: text}, ensure_ascii=False)
    rest = {key: value for key, value in call.items() if key != "custom"}
    return {**rest, "type": "function", "function": {"name": name, "arguments": arguments}}


class InputReader:
    """Reads the input of one call from its arguments as they arrive.

    Arguments of another form, as a model that no grammar holds may write them, are the input.
    """

    def __init__(self) -> None:
        """Start a call."""
        self._held = ""
        self._is_open = self._has_ended = False

    def feed(self, arguments: str) -> str:
        """Return the text of the next part of the arguments."""
        self._held += arguments
        if self._has_ended:
            return ""
        if not self._is_open:
            opening = _OPENING.match(self._held)
            if opening is None:
                return self._other_form()
            self._held, self._is_open = self._held[opening.end() :], True
        return self._content()

    def _content(self) -> str:
        found = _CONTENT.match(self._held)
        place = 0 if found is None else found.end()
        taken, self._held = self._held[:place], self._held[place:]
        self._has_ended = self._held.startswith('"')
        text: str = json.loads(f'"{taken}"', strict=False)
        return text

    def _other_form(self) -> str:
        """Return all of the arguments, once they are complete."""
        try:
            given = json.loads(self._held)
        except (ValueError, RecursionError):
            return ""
        self._has_ended = True
        text = given.get(_INPUT) if isinstance(given, dict) else None
        return text if isinstance(text, str) else self._held

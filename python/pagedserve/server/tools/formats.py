"""Tool call formats of model families, one table row each.

A format defines the start of a call, its end, and the parser of the text between; the rest is
common (`pagedserve.server.tools.tag_stream`).  The names are those of vLLM's parsers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from pagedserve.server.tools.ends import (
    JSON_STRINGS,
    PYTHON_STRINGS,
    End,
    EndBehindTags,
    EndOutsideStrings,
    closes_function,
    closes_value,
)
from pagedserve.server.tools.generic import START
from pagedserve.server.tools.grammar_calls import END
from pagedserve.server.tools.readers import (
    Call,
    Schemas,
    read_by_header,
    read_functions,
    read_json,
    read_keys_and_values,
    read_mistral,
    read_pythonic,
)

if TYPE_CHECKING:  # it imports numpy, and the options of the server name the formats
    from pagedserve.inputs.chat import Conversation, Message

# The variable of a template that has the tools.
_SHOWS_TOOLS: Final = re.compile(r"\btools\b")
_OUTSIDE_STRINGS: Final = partial(EndOutsideStrings, strings=JSON_STRINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Tool call format of a model family.

    Attributes:
        starts: Start tags, each before one call or several, anywhere in a text.
        end: End tag; None is the end of the text.
        begin_end: Creates the search for the end: arguments may contain the same tag.
        read: Parses the text between; raises ``ValueError`` if it is not a call.
        bare_starts: Strings that start calls at the start of a text, and are part of them.
        marks: Strings that all occur in the chat templates of the family.
        id_length: Length of a call's id, if the family's template requires one.
        names_in_ids: Whether the template shows the id of an earlier call in place of its name.
        is_generic: Whether the format is that of templates which show no tools; see
            `pagedserve.server.tools.generic`.
    """

    starts: tuple[str, ...] = ()
    end: str | None = None
    begin_end: Callable[[str], End] = _OUTSIDE_STRINGS
    read: Callable[[str, Schemas], list[Call]]
    bare_starts: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    id_length: int | None = None
    names_in_ids: bool = False
    is_generic: bool = False


# Formats with more marks come after those with fewer; the first match is used.
TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    "qwen3_coder": ToolFormat(
        starts=("<tool_call>",),
        end="</tool_call>",
        begin_end=partial(EndBehindTags, closes=closes_function),
        read=read_functions,
        marks=("<tool_call>", "<function="),
    ),
    "glm45": ToolFormat(
        starts=("<tool_call>",),
        end="</tool_call>",
        begin_end=partial(EndBehindTags, closes=closes_value),
        read=read_keys_and_values,
        marks=("<tool_call>", "<arg_key>"),
    ),
    "hermes": ToolFormat(
        starts=("<tool_call>",), end="</tool_call>", read=read_json, marks=("<tool_call>",)
    ),
    "jamba": ToolFormat(
        starts=("<tool_calls>",), end="</tool_calls>", read=read_json, marks=("<tool_calls>",)
    ),
    "mistral": ToolFormat(
        starts=("[TOOL_CALLS]",), read=read_mistral, marks=("[TOOL_CALLS]",), id_length=9
    ),
    "granite": ToolFormat(
        starts=("<|tool_call|>", "<tool_call>"),
        read=read_json,
        bare_starts=("[",),
        marks=("<|tool_call|>",),
    ),
    "deepseek_v3": ToolFormat(
        starts=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        read=read_by_header(
            r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]{1,256})\n```json\n"
        ),
        marks=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    "deepseek_v31": ToolFormat(
        starts=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        read=read_by_header(r"<｜tool▁call▁begin｜>(?P<name>[^<]{1,256})<｜tool▁sep｜>"),
        marks=("<｜tool▁calls▁begin｜>",),
    ),
    "kimi_k2": ToolFormat(
        starts=("<|tool_calls_section_begin|>",),
        end="<|tool_calls_section_end|>",
        read=read_by_header(
            r"<\|tool_call_begin\|>\s*(?=(?P<id>[^\s<]{1,256}))"
            r"(?:functions\.)?(?P<name>[^\s:<]{1,256})(?::\d+)?\s*<\|tool_call_argument_begin\|>"
        ),
        marks=("<|tool_calls_section_begin|>",),
        names_in_ids=True,
    ),
    "internlm": ToolFormat(
        starts=("<|action_start|><|plugin|>",),
        end="<|action_end|>",
        read=read_json,
        marks=("<|action_start|>",),
    ),
    "phi4_mini_json": ToolFormat(starts=("functools",), read=read_json, marks=("functools",)),
    "llama3_json": ToolFormat(
        starts=("<|python_tag|>",),
        read=read_json,
        bare_starts=("{",),
        marks=("<|python_tag|>",),
    ),
    "pythonic": ToolFormat(
        starts=("<|python_start|>",),
        end="<|python_end|>",
        begin_end=partial(EndOutsideStrings, strings=PYTHON_STRINGS),
        read=read_pythonic,
        bare_starts=("[",),
        marks=("<|python_start|>",),
    ),
    "generic": ToolFormat(starts=(START,), end=END, read=read_json, is_generic=True),
}


def with_ids(messages: "Conversation", length: int) -> "list[Message]":
    """Give the ids of calls and results a length: the last letters and digits, after zeros.

    Clients send ids back with a prefix, and those that another model's calls had.
    """
    found: list[Message] = []
    for message in messages:
        if isinstance(calls := message.get("tool_calls"), list):
            calls = [_with_id(call, "id", length) for call in calls]
            found.append({**message, "tool_calls": calls})
        else:
            found.append(_with_id(message, "tool_call_id", length))
    return found


def _with_id(given: Any, name: str, length: int) -> Any:
    if not isinstance(given, Mapping) or not isinstance(given.get(name), str):
        return given
    kept = "".join(char for char in given[name] if char.isascii() and char.isalnum())
    return {**given, name: kept[-length:].rjust(length, "0")}


@lru_cache(maxsize=16)
def tool_format_of(chat_template: str | None) -> ToolFormat | None:
    """Tool call format of a chat template; None if it is unknown.

    It is the generic format if the template shows no tools.
    """
    template = chat_template or ""
    families = (entry for entry in TOOL_FORMATS.values() if entry.marks)
    found = next(
        (entry for entry in families if all(mark in template for mark in entry.marks)), None
    )
    if found is None and not _SHOWS_TOOLS.search(template):
        return TOOL_FORMATS["generic"]
    return found

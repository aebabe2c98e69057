"""How families of models write tool calls and thoughts down, one line of a table each.

A format is what begins a call, what ends it, and how what stands between them is read; the rest is
the same for all (`pagedserve.server.tag_stream`).  The names are those of vLLM's parsers.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

# The JSON schema of the arguments of each tool, by its name.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]


class NoCallError(ValueError):
    """A text is no call."""


class Call(NamedTuple):
    """A call that a model wants.

    Attributes:
        name: Of the tool.
        arguments: A JSON object, as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        starts: Each begins one call or several, wherever in a text.
        end: Ends them; None is the end of the text.
        read: Reads what stands between; raises ``ValueError`` where
            that is no call.
        bare_starts: Begin calls at the beginning of a text, and belong to them.
        marks: All of them are in the chat templates of the family.
        id_length: Characters of a call's id, where the family's template asks for a number of them.
    """

    starts: tuple[str, ...] = ()
    end: str | None = None
    read: Callable[[str, Schemas], list[Call]]
    bare_starts: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    id_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family writes thoughts before its answer.

    Attributes:
        start: Begins them.
        end: Ends them.
        begins: Whether texts begin with thoughts though ``start`` is not there.
    """

    start: str
    end: str
    begins: bool = False


def _dumped(arguments: object) -> str:
    if isinstance(arguments, str):  # written down already
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise NoCallError("arguments are an object")
    return json.dumps(arguments, ensure_ascii=False)


def _call(found: object) -> Call:
    """A call that an object names."""
    if not isinstance(found, dict) or not isinstance(name := found.get("name"), str):
        raise NoCallError("a call is an object with a name")
    given = (found[key] for key in ("arguments", "parameters", "args") if key in found)
    return Call(name, _dumped(next(given, {})))


def _values(text: str) -> Iterator[Any]:
    """JSON values one behind another, with space, commas or semicolons between them."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        if text[place] in " \t\r\n,;":
            place += 1
        else:
            value, place = decoder.raw_decode(text, place)
            yield value


def read_json(text: str, schemas: Schemas) -> list[Call]:
    """Objects with a name and arguments, alone or in lists."""
    del schemas
    calls: list[Call] = []
    for value in _values(text):
        calls += map(_call, value if isinstance(value, list) else [value])
    if not calls:
        raise NoCallError("there is no call")
    return calls


def _matches(pattern: "re.Pattern[str]", text: str) -> list[tuple[str, ...]]:
    found = [match.groups() for match in pattern.finditer(text)]
    if not found:
        raise NoCallError("there is no call")
    return found


def _by_pattern(pattern: str) -> Callable[[str, Schemas], list[Call]]:
    """Reads calls whose name and JSON arguments a regular expression finds."""
    compiled = re.compile(pattern, re.DOTALL)

    def read(text: str, schemas: Schemas) -> list[Call]:
        del schemas
        return [Call(name.strip(), _dumped(given)) for name, given in _matches(compiled, text)]

    return read


def _by_tags(calls: str, arguments: str) -> Callable[[str, Schemas], list[Call]]:
    """Reads calls whose arguments are tagged one by one, with values of the schema's types."""
    compiled, inner = re.compile(calls, re.DOTALL), re.compile(arguments, re.DOTALL)

    def read(text: str, schemas: Schemas) -> list[Call]:
        read_calls = []
        for name, body in _matches(compiled, text):
            if name.strip() not in schemas:
                raise NoCallError("there is no such tool")
            known = schemas[name.strip()].get("properties", {})
            given = {
                key.strip(): _typed(value, known.get(key.strip(), {}))
                for key, value in inner.findall(body)
            }
            read_calls.append(Call(name.strip(), json.dumps(given, ensure_ascii=False)))
        return read_calls

    return read


def _typed(value: str, schema: object) -> Any:
    """A tagged value, which is text where its schema says so, else JSON if it can be."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)


def _read_mistral(text: str, schemas: Schemas) -> list[Call]:
    """A list of objects; or of newer models a name and its arguments, for each call."""
    if text.lstrip()[:1] in ("[", "{"):
        return read_json(text, schemas)
    calls, decoder, place = [], json.JSONDecoder(), 0
    while name := text[place:].partition("{")[0]:
        start = place + len(name)
        arguments, place = decoder.raw_decode(text, start)
        plain = name.replace("[TOOL_CALLS]", "").partition("[CALL_ID]")[0].partition("[ARGS]")[0]
        calls.append(Call(plain.strip(), _dumped(arguments)))
        place += len(text[place:]) - len(text[place:].lstrip())
    if not calls:
        raise NoCallError("there is no call")
    return calls


def _read_pythonic(text: str, schemas: Schemas) -> list[Call]:
    """A list of calls as Python writes them."""
    del schemas
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise NoCallError(str(error)) from error
    entries = body.elts if isinstance(body, ast.List) else [body]
    calls = []
    for entry in entries:
        if not isinstance(entry, ast.Call) or entry.args:
            raise NoCallError("there is no call by names")
        given = {word.arg: ast.literal_eval(word.value) for word in entry.keywords if word.arg}
        calls.append(Call(ast.unparse(entry.func), json.dumps(given, ensure_ascii=False)))
    if not calls:
        raise NoCallError("there is no call")
    return calls


# Those with more in common stand behind those with less: the first whose marks are there is taken.
TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    "qwen3_coder": ToolFormat(
        starts=("<tool_call>",),
        end="</tool_call>",
        read=_by_tags(
            r"<function=([^>]+)>(.*?)</function>",
            r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>",
        ),
        marks=("<tool_call>", "<function="),
    ),
    "glm45": ToolFormat(
        starts=("<tool_call>",),
        end="</tool_call>",
        read=_by_tags(
            r"^\s*([^\s<]+)(.*)$", r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
        ),
        marks=("<tool_call>", "<arg_key>"),
    ),
    "hermes": ToolFormat(
        starts=("<tool_call>",), end="</tool_call>", read=read_json, marks=("<tool_call>",)
    ),
    "jamba": ToolFormat(
        starts=("<tool_calls>",), end="</tool_calls>", read=read_json, marks=("<tool_calls>",)
    ),
    "mistral": ToolFormat(
        starts=("[TOOL_CALLS]",), read=_read_mistral, marks=("[TOOL_CALLS]",), id_length=9
    ),
    "granite": ToolFormat(starts=("<|tool_call|>",), read=read_json, marks=("<|tool_call|>",)),
    "deepseek_v3": ToolFormat(
        starts=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        read=_by_pattern(
            r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n?```"
        ),
        marks=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    "deepseek_v31": ToolFormat(
        starts=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        read=_by_pattern(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>"),
        marks=("<｜tool▁calls▁begin｜>",),
    ),
    "kimi_k2": ToolFormat(
        starts=("<|tool_calls_section_begin|>",),
        end="<|tool_calls_section_end|>",
        read=_by_pattern(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?([^\s:<]+)(?::\d+)?\s*"
            r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
        ),
        marks=("<|tool_calls_section_begin|>",),
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
        read=_read_pythonic,
        bare_starts=("[",),
        marks=("<|python_start|>",),
    ),
}

_THINK: Final = ReasoningFormat(start="<think>", end="</think>")
REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "deepseek_r1": ReasoningFormat(start="<think>", end="</think>", begins=True),
    "qwen3": _THINK,
    "glm45": _THINK,
    "mistral": ReasoningFormat(start="[THINK]", end="[/THINK]"),
    "granite": ReasoningFormat(start="Here is my thought process:", end="Here is my response:"),
    "kimi": ReasoningFormat(start="◁think▷", end="◁/think▷"),
    "seed_oss": ReasoningFormat(start="<seed:think>", end="</seed:think>"),
}


def tool_format_of(chat_template: str | None) -> ToolFormat | None:
    """The format that a chat template writes earlier calls in; None where none is known there."""
    template = chat_template or ""
    known = TOOL_FORMATS.values()
    return next((entry for entry in known if all(mark in template for mark in entry.marks)), None)

"""Parsers of tool calls, shared by several formats.

A parser takes the text between the tags of a format and raises `ValueError` if it is not a call.
Its result is always valid JSON (`pagedserve.server.tools.values`); arguments in JSON are returned
as they are written.

Costs: each parser scans its text once, whatever it is: a model may be made to write tags by the
thousand.
"""

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from pagedserve.server.tools.values import DECODER, as_written, dumps, typed_arguments

# JSON schema of each tool's arguments, by its name.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]

_SPACE: Final = re.compile(r"\s*")
# Prefix of a call before its arguments.
_NAME: Final = re.compile(r"\s*([^\s<]{1,256})\s*(?=<arg_key>|\Z)")
_SEPARATORS: Final = re.compile(r"[ \t\r\n,;]*")
_JSON_NAMES: Final = {"true": True, "false": False, "null": None}


class NoCallError(ValueError):
    """The text is not a call."""


class Call(NamedTuple):
    """A tool call of the model.

    Attributes:
        name: Name of the tool.
        arguments: JSON object, as text.
        call_id: Id that the model wrote; None for most formats, in which it writes none.
    """

    name: str
    arguments: str
    call_id: str | None = None


@dataclass(slots=True)
class Parts:
    """Parsed parts of a chunk of text.

    Attributes:
        reasoning: Reasoning text.
        content: Content text.
        calls: Tool calls; the last one may be continued.
        more_arguments: Text that continues the arguments of the last call of earlier chunks.
        is_cut: Whether the last call is incomplete: the text ended within its arguments.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    more_arguments: str = ""
    is_cut: bool = False


def _call(members: Mapping[str, "_Value"]) -> Call:
    """Convert the members of an object to a call."""
    name = members["name"].value if "name" in members else None
    if not isinstance(name, str):
        raise NoCallError("a call is an object with a name")
    given = (members[key] for key in ("arguments", "parameters", "args") if key in members)
    return Call(name, _arguments(next(given, _NO_ARGUMENTS)))


def _arguments(given: "_Value") -> str:
    """JSON of arguments, as the model wrote them."""
    if isinstance(given.value, str):  # serialized twice
        given = _Value(DECODER.decode(given.value), given.value.strip())
    if not isinstance(given.value, dict):
        raise NoCallError("arguments are an object")
    return as_written(given.text)


def _all_of(calls: list[Call]) -> list[Call]:
    if not calls:
        raise NoCallError("there is no call")
    return calls


def _after(pattern: "re.Pattern[str]", text: str, place: int) -> int:
    found = pattern.match(text, place)
    return place if found is None else found.end()


class _Value(NamedTuple):
    """A JSON value, and its text."""

    value: Any
    text: str


_NO_ARGUMENTS: Final = _Value({}, "{}")


def _value(text: str, place: int) -> tuple[_Value, int]:
    """The JSON value at a position, and the position after it."""
    value, end = DECODER.raw_decode(text, place)
    return _Value(value, text[place:end]), end


def _members(text: str, place: int) -> tuple[dict[str, _Value], int]:
    """Members of the JSON object at a position, and the position after it."""
    members: dict[str, _Value] = {}
    place = _token(text, place, "{")
    while text[place : place + 1] != "}":
        if members:
            place = _token(text, place, ",")
        key, place = _value(text, place)
        if not isinstance(key.value, str):
            raise NoCallError("a key is a string")
        members[key.value], place = _value(text, _token(text, place, ":"))
        place = _after(_SPACE, text, place)
    return members, place + 1


def _token(text: str, place: int, token: str) -> int:
    """Position of what follows a token, and the whitespace beside it."""
    place = _after(_SPACE, text, place)
    if text[place : place + 1] != token:
        raise NoCallError(f"{token} is missing")
    return _after(_SPACE, text, place + 1)


def _calls(text: str) -> Iterator[Call]:
    """Calls in sequence, alone or in lists, separated by whitespace, commas or semicolons."""
    place, is_listed = _after(_SEPARATORS, text, 0), False
    while place < len(text):
        if text[place] == ("]" if is_listed else "["):
            is_listed, place = not is_listed, place + 1
        else:
            members, place = _members(text, place)
            yield _call(members)
        place = _after(_SEPARATORS, text, place)
    if is_listed:
        raise NoCallError("] is missing")


def read_json(text: str, schemas: Schemas) -> list[Call]:
    """Parse objects with a name and arguments, alone or in lists."""
    del schemas
    return _all_of([*_calls(text)])


def read_by_header(header: str) -> Callable[[str, Schemas], list[Call]]:
    """Create a parser of calls: a regular expression for the name, then JSON arguments.

    Its groups are the name, and the id where the model writes one.
    """
    compiled = re.compile(header)

    def read(text: str, schemas: Schemas) -> list[Call]:
        del schemas
        calls: list[Call] = []
        place = 0
        while found := compiled.search(text, place):
            given, place = _value(text, _after(_SPACE, text, found.end()))
            call_id = found.groupdict().get("id")
            calls.append(Call(found["name"].strip(), _arguments(given), call_id))
        return _all_of(calls)

    return read


def read_functions(text: str, schemas: Schemas) -> list[Call]:
    """Parse ``<function=name>`` with a ``<parameter=name>`` for each argument."""
    calls: list[Call] = []
    ends = _Ends(text, "</parameter>", r"<parameter=|</function>\s*(?:<function=|\Z)")
    place = 0
    while (start := text.find("<function=", place)) >= 0:
        name, place = _name(text, start + len("<function="), ">")
        texts: dict[str, str] = {}
        while text.startswith("<parameter=", place := _after(_SPACE, text, place)):
            key, place = _name(text, place + len("<parameter="), ">")
            value, place = ends.content(place)
            texts[key] = value.removeprefix("\n").removesuffix("\n")
        _, place = _name(text, place, "</function>")
        calls.append(Call(name, typed_arguments(texts, schemas.get(name, {}))))
    return _all_of(calls)


def read_keys_and_values(text: str, schemas: Schemas) -> list[Call]:
    """Parse a name, and ``<arg_key>`` and ``<arg_value>`` for each argument."""
    head = _NAME.match(text)
    if head is None:
        raise NoCallError("there is no call")
    name, place = head[1], head.end()
    texts: dict[str, str] = {}
    ends = _Ends(text, "</arg_value>", r"<arg_key>|\Z")
    while (start := text.find("<arg_key>", place)) >= 0:
        key, place = _name(text, start + len("<arg_key>"), "</arg_key>")
        _, place = _name(text, place, "<arg_value>")
        texts[key], place = ends.content(place)
    if not texts and name not in schemas:
        raise NoCallError("a word alone is a call only of a tool that is known")
    return [Call(name, typed_arguments(texts, schemas.get(name, {})))]


def _name(text: str, place: int, end: str) -> tuple[str, int]:
    """Text from a position to a tag, and the position after the tag."""
    found = text.find(end, place)
    if found < 0:
        raise NoCallError(f"{end} is missing")
    return text[place:found].strip(), found + len(end)


class _Ends:
    """End tags of the values of a text.

    A value may contain its end tag: it ends at the first tag that is followed by valid text, or
    else at the first of all.
    """

    def __init__(self, text: str, tag: str, follows: str) -> None:
        """Store the tag, and a regular expression for the text after it."""
        self._text = text
        self._tag = tag
        self._end: re.Pattern[str] | None = re.compile(rf"{re.escape(tag)}(?=\s*(?:{follows}))")

    def content(self, place: int) -> tuple[str, int]:
        """The value that starts at a position, and the position after its tag."""
        found = None if self._end is None else self._end.search(self._text, place)
        if found is None:
            self._end = None  # none follows: the text need not be searched again
        first = self._text.find(self._tag, place) if found is None else found.start()
        if first < 0:
            raise NoCallError(f"{self._tag} is missing")
        return self._text[place:first], first + len(self._tag)


def read_mistral(text: str, schemas: Schemas) -> list[Call]:
    """Parse a list of objects; or, for newer models, a name and its arguments for each call."""
    if text.lstrip()[:1] in ("[", "{"):
        return read_json(text, schemas)
    calls: list[Call] = []
    place = 0
    while place < len(text):
        start = text.find("{", place)
        name = text[place : start if start >= 0 else len(text)]
        given, place = _value(text, place + len(name))
        plain = name.replace("[TOOL_CALLS]", "").partition("[CALL_ID]")[0].partition("[ARGS]")[0]
        calls.append(Call(plain.strip(), _arguments(given)))
        place = _after(_SPACE, text, place)
    return _all_of(calls)


def read_pythonic(text: str, schemas: Schemas) -> list[Call]:
    """Parse a list of calls in Python syntax."""
    del schemas
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the code is the model's
            body = ast.parse(text.strip(), mode="eval").body
        entries = body.elts if isinstance(body, ast.List) else [body]
        return _all_of([_pythonic(entry) for entry in entries])
    except (SyntaxError, TypeError, MemoryError) as error:  # deep nesting, or an invalid value
        raise NoCallError(str(error)) from error


def _pythonic(entry: ast.expr) -> Call:
    if not isinstance(entry, ast.Call) or entry.args:
        raise NoCallError("there is no call by names")
    words = {word.arg: _Names().visit(word.value) for word in entry.keywords if word.arg}
    given = {name: ast.literal_eval(value) for name, value in words.items()}
    return Call(ast.unparse(entry.func), dumps(given))


class _Names(ast.NodeTransformer):
    """Replaces JSON's names by their values: models write them in Python too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name."""
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node

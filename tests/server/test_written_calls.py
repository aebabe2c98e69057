"""A call as its family's template writes it is read back, wherever a stream is cut."""

import json
import keyword
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedserve.server.tools.formats import TOOL_FORMATS
from pagedserve.server.tools.generic import HELD_HEAD
from pagedserve.server.tools.readers import Call, Parts
from pagedserve.server.tools.tag_stream import TagStream
from tests.server.test_tag_stream import CLOSING, GIVEN, HOSTILE, TEXTS
from tests.support.examples import examples

NUMBERS = [
    *("1e400", "-1E+400", "1e-400", "12345678901234567890", "1.0", "-0", "-0.0", "0", "1E5"),
    *("0.1000000000000000055511151231257827", "9007199254740993", "9" * 400, "9" * 5000, "2e0"),
]
# Families whose values are texts without quotes, and those whose values are Python's.
TAGGED = {"qwen3_coder", "glm45"}
PYTHON = {"pythonic"}

strings = st.text(max_size=8) | st.lists(st.sampled_from(HOSTILE), max_size=6).map("".join)
spaces = st.sampled_from(["", "", " ", "\n  ", "\t", "\r\n"])


@st.composite
def json_strings(draw: st.DrawFn) -> str:
    """A string as JSON, with any escapes."""
    text = json.dumps(draw(strings), ensure_ascii=draw(st.booleans()))
    return text.replace("<", draw(st.sampled_from(["<", "\\u003c", "\\u003C"])))


numbers = st.sampled_from(NUMBERS) | st.one_of(
    st.integers().map(str), st.floats(allow_nan=False, allow_infinity=False).map(json.dumps)
)
scalars = json_strings() | numbers | st.sampled_from(["true", "false", "null"])


@st.composite
def wholes(draw: st.DrawFn, parts: st.SearchStrategy[str]) -> str:
    """A list or an object as JSON, with whitespace anywhere."""
    keys = draw(st.none() | st.just(json_strings()))
    entries = draw(st.lists(parts, max_size=3))
    if keys is not None:
        entries = [f"{draw(keys)}{draw(spaces)}:{draw(spaces)}{part}" for part in entries]
    ends = "[]" if keys is None else "{}"
    text = ",".join(f"{draw(spaces)}{entry}{draw(spaces)}" for entry in entries)
    return f"{ends[0]}{text or draw(spaces)}{ends[1]}"


def nested(text: str) -> st.SearchStrategy[str]:
    return st.integers(0, 100).map(lambda depth: '[{"a": ' * depth + text + "}]" * depth)


values = st.recursive(scalars, wholes, max_leaves=6) | scalars.flatmap(nested)
objects = st.dictionaries(json_strings(), values, max_size=4)
names = st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True)
plain_names = names.filter(lambda name: not keyword.iskeyword(name))


def as_json(members: dict[str, str]) -> str:
    """JSON of arguments; their names and values are JSON already."""
    return "{" + ", ".join(f"{name}: {value}" for name, value in members.items()) + "}"


def json_call(family: str, members: dict[str, str]) -> str:
    return TEXTS[family].replace(GIVEN, as_json(members))


def qwen_call(members: dict[str, str]) -> str:
    parts = (
        f"<parameter={json.loads(name)}>\n{shown(value)}\n</parameter>\n"
        for name, value in members.items()
    )
    return f"<tool_call>\n<function=weather>\n{''.join(parts)}</function>\n</tool_call>"


def glm_call(members: dict[str, str]) -> str:
    parts = (
        f"<arg_key>{json.loads(name)}</arg_key>\n<arg_value>{shown(value)}</arg_value>\n"
        for name, value in members.items()
    )
    return f"<tool_call>weather\n{''.join(parts)}</tool_call>"


def shown(value: str) -> str:
    """A value as templates show it: strings without quotes."""
    return json.loads(value) if value.startswith('"') else value


def pythonic_call(members: dict[str, str], *, write: Callable[[Any], str]) -> str:
    words = (f"{json.loads(name)}={write(json.loads(value))}" for name, value in members.items())
    return f"<|python_start|>[weather({', '.join(words)})]<|python_end|>"


TYPES = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}


def schema_of(members: dict[str, str]) -> dict[str, Any]:
    properties = {
        json.loads(name): {"type": TYPES.get(value[0], "number")} for name, value in members.items()
    }
    return {"type": "object", "properties": properties}


def canonical(value: str) -> str:
    """A string as it is serialized; other values as they are written."""
    if not value.startswith('"'):
        return value
    text = json.dumps(json.loads(value), ensure_ascii=False)
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def read(pieces: list[str], family: str, schema: dict[str, Any]) -> Parts:
    stream, whole = TagStream(TOOL_FORMATS[family], {"weather": schema}), Parts()
    for place, piece in enumerate(pieces):
        parts = stream.feed(piece, is_last=place == len(pieces) - 1)
        whole.content += parts.content
        whole.calls += parts.calls
    return whole


def check(data: st.DataObject, family: str, text: str, wanted: str, schema: Any) -> None:
    """A text of a call is read as the call, with and without cuts, alone or several times."""
    several = data.draw(st.integers(1, 3)) if TOOL_FORMATS[family].end else 1
    whole = "\n".join([text] * several)
    ends = [*sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8))), len(whole)]
    pieces = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    call_id = "functions.weather:0" if family == "kimi_k2" else None
    calls = [Call("weather", wanted, call_id)] * several
    assert read(pieces, family, schema) == Parts(calls=calls)
    if len(whole) < 400:
        assert read([*whole, ""], family, schema) == Parts(calls=calls)


NUM_EXAMPLES = examples(10, all_of_them=1000)


@pytest.mark.parametrize("family", sorted(TOOL_FORMATS.keys() - TAGGED - PYTHON))
@given(data=st.data(), members=objects)
@settings(max_examples=NUM_EXAMPLES)
def test_json_arguments_stay_as_they_are_written(
    family: str, data: st.DataObject, members: dict[str, str]
) -> None:
    check(data, family, json_call(family, members), as_json(members), {"type": "object"})


@pytest.mark.parametrize(("family", "write"), [("qwen3_coder", qwen_call), ("glm45", glm_call)])
@given(data=st.data(), members=st.dictionaries(names.map(json.dumps), values, max_size=4))
@settings(max_examples=NUM_EXAMPLES)
def test_untyped_values_become_what_the_schema_says(
    family: str,
    write: Callable[[dict[str, str]], str],
    data: st.DataObject,
    members: dict[str, str],
) -> None:
    # Where a value itself closes all that is open, nothing tells it from the end.
    assume(not any(CLOSING.search(shown(value) + "\n") for value in members.values()))
    wanted = as_json({name: canonical(value) for name, value in members.items()})
    check(data, family, write(members), wanted, schema_of(members))


@pytest.mark.parametrize("write", [repr, partial(json.dumps, ensure_ascii=False)])
@given(data=st.data(), members=st.dictionaries(plain_names.map(json.dumps), values, max_size=4))
@settings(max_examples=NUM_EXAMPLES)
def test_python_s_values_are_those_of_json(
    write: Callable[[Any], str], data: st.DataObject, members: dict[str, str]
) -> None:
    assume(not any(re.search(r"[eE]\+?400|9{5000}", value) for value in members.values()))
    assume(not any(value.count("[") > 80 for value in members.values()))
    parsed = {json.loads(name): json.loads(value) for name, value in members.items()}
    wanted = json.dumps(parsed, ensure_ascii=False)
    check(data, "pythonic", pythonic_call(members, write=write), wanted, {})


@given(data=st.data(), members=objects)
@settings(max_examples=NUM_EXAMPLES)
def test_arguments_of_held_calls_are_given_as_they_come(
    data: st.DataObject, members: dict[str, str]
) -> None:
    wanted, num_calls = as_json(members), data.draw(st.integers(1, 3))
    head, rest = json_call("generic", members).split(wanted)
    whole = "I look.\n" + "\n".join([head + wanted + rest] * num_calls)
    cut = data.draw(st.integers(0, len(whole)))
    ends = [*sorted(data.draw(st.lists(st.integers(0, cut), max_size=8))), cut]
    stream = TagStream(TOOL_FORMATS["generic"], {}, held_head=HELD_HEAD)
    content: str = ""
    found: list[str] = []
    for start, end in zip([0, *ends], ends, strict=False):
        parts = stream.feed(whole[start:end], is_last=False)
        content += parts.content
        if parts.more_arguments:
            found[-1] += parts.more_arguments
        found += [call.arguments for call in parts.calls]
        come = whole[:end].split(head)[1:]
        assert len(found) == sum(map(bool, come))
        for given_text, arguments in zip(come, found, strict=False):
            expected = given_text[: len(wanted)]
            assert expected.removesuffix("\\") == arguments.removesuffix("\\")
    parts = stream.feed(whole[cut:] if data.draw(st.booleans()) else "", is_last=True)
    assert parts.is_cut == bool(found and len(found[-1] + parts.more_arguments) < len(wanted))
    assert content + parts.content in {"I look.", "I look.\n", whole[:cut]}

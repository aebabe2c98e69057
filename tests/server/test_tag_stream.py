"""Each family's calls and thoughts are read alike in every split of their text."""

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedserve.config.reasoning import REASONING_FORMATS
from pagedserve.server.tools.formats import TOOL_FORMATS, tool_format_of
from pagedserve.server.tools.readers import Call, Parts
from pagedserve.server.tools.tag_stream import TagStream

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }
}
ARGUMENTS = {"city": "Köln <3", "days": 2}
OBJECT = json.dumps({"name": "weather", "arguments": ARGUMENTS}, ensure_ascii=False)
GIVEN = json.dumps(ARGUMENTS, ensure_ascii=False)
# One call, as each family writes it.
TEXTS = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "generic": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "jamba": f"<tool_calls>[{OBJECT}]</tool_calls>",
    "mistral": f"[TOOL_CALLS][{OBJECT}]",
    "granite": f"<|tool_call|>[{OBJECT}]",
    "internlm": f"<|action_start|><|plugin|>\n{OBJECT}<|action_end|>",
    "phi4_mini_json": f"functools[{OBJECT}]",
    "llama3_json": OBJECT.replace("arguments", "parameters"),
    "pythonic": "[weather(city='Köln <3', days=2)]",
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln <3\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln <3</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{GIVEN}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f"{GIVEN}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{GIVEN}<|tool_call_end|><|tool_calls_section_end|>"
    ),
}
# Two calls in the families that write several in one go or one after another.
BOTH = {
    "hermes": f"{TEXTS['hermes']}\n{TEXTS['hermes']}",
    "mistral": f"[TOOL_CALLS][{OBJECT}, {OBJECT}]",
    "llama3_json": f"{OBJECT}; {OBJECT}",
    "qwen3_coder": TEXTS["qwen3_coder"] * 2,
    "pythonic": "[weather(city='Köln <3', days=2), weather(city='Köln <3', days=2)]",
    "deepseek_v31": TEXTS["deepseek_v31"].replace(
        "<｜tool▁calls▁end｜>", TEXTS["deepseek_v31"].removeprefix("<｜tool▁calls▁begin｜>")
    ),
}


def read(pieces: list[str], tools: str | None, reasoning: str | None = None, **more: Any) -> Parts:
    formats = TOOL_FORMATS.get(tools or ""), REASONING_FORMATS.get(reasoning or "")
    stream, whole = TagStream(formats[0], SCHEMAS, formats[1], **more), Parts()
    for place, piece in enumerate(pieces):
        parts = stream.feed(piece, is_last=place == len(pieces) - 1)
        whole.reasoning += parts.reasoning
        whole.content += parts.content
        whole.calls += parts.calls
    return whole


def in_every_split(text: str, *given: Any, **more: Any) -> Parts:
    """What all splits of a text in two, and the one in characters, give."""
    whole = read([text], *given, **more)
    for place in range(len(text) + 1):
        assert read([text[:place], text[place:]], *given, **more) == whole, place
    assert read([*text, ""], *given, **more) == whole
    return whole


def call_of(name: str, arguments: str = GIVEN) -> Call:
    """The call of the texts above; models of one family write its id too."""
    return Call("weather", arguments, "functions.weather:0" if name == "kimi_k2" else None)


def test_there_is_a_text_of_each_family() -> None:
    assert TEXTS.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("name", TEXTS)
def test_a_call_is_read_in_every_split(name: str) -> None:
    assert in_every_split(TEXTS[name], name) == Parts(calls=[call_of(name)])


def test_granites_other_spellings_are_calls() -> None:
    for text in (f"<tool_call>[{OBJECT}]", f"[{OBJECT}]"):
        assert in_every_split(text, "granite") == Parts(calls=[Call("weather", GIVEN)])


@pytest.mark.parametrize("name", [name for name in TEXTS if TOOL_FORMATS[name].starts])
def test_text_before_a_call_is_content(name: str) -> None:
    tools = TOOL_FORMATS[name]
    text = TEXTS[name] if TEXTS[name].startswith(tools.starts) else tools.starts[0] + TEXTS[name]
    text = text if tools.end is None or text.endswith(tools.end) else text + tools.end
    found = in_every_split(f"I look. 1 < 2 [and]\n\n{text}", name)
    assert found == Parts(content="I look. 1 < 2 [and]", calls=[call_of(name)])


@pytest.mark.parametrize("name", BOTH)
def test_several_calls_are_read_in_every_split(name: str) -> None:
    assert in_every_split(BOTH[name], name).calls == [Call("weather", GIVEN)] * 2


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_call_is_shown_as_it_was_written(name: str) -> None:
    tools = TOOL_FORMATS[name]
    start = tools.starts[0]
    end = tools.end or ""
    for text in (f" Use {start} so. ", f"{start}no call {end}\n x", f"{start}", " plain text\n"):
        assert in_every_split(text, name) == Parts(content=text)


def test_text_after_a_call_is_content_too() -> None:
    found = in_every_split(f"a\n{TEXTS['hermes']}\n\nb\n{TEXTS['hermes']} ", "hermes")
    assert found == Parts(content="a\n\n\nb", calls=[Call("weather", GIVEN)] * 2)


def test_a_call_without_its_end_is_read_where_it_is_whole() -> None:
    found = in_every_split(TEXTS["hermes"].removesuffix("\n</tool_call>"), "hermes")
    assert found.calls == [Call("weather", GIVEN)]


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_thoughts_are_told_from_the_answer(name: str) -> None:
    known = REASONING_FORMATS[name]
    text = f"{known.start}\nFirst, 1 < 2.\n{known.end}\n\nSo it is."
    assert in_every_split(text, None, name) == Parts("First, 1 < 2.", "So it is.")
    # The prompt may have ended with the tag.
    begun = in_every_split(text.removeprefix(known.start), None, name, is_reasoning=True)
    assert begun == Parts("First, 1 < 2.", "So it is.")


def test_thoughts_that_do_not_end_are_all_there_is() -> None:
    assert in_every_split("<think>on and on", None, "qwen3") == Parts("on and on")
    assert in_every_split("no thoughts </think>", None, "qwen3") == Parts(
        "", "no thoughts </think>"
    )
    begun = in_every_split("thoughts </think> end", None, "deepseek_r1", is_reasoning=True)
    assert begun == Parts("thoughts", "end")


def test_calls_come_after_thoughts() -> None:
    text = f"<think>look it up</think>\n{TEXTS['hermes']}"
    assert in_every_split(text, "hermes", "qwen3") == Parts(
        "look it up", "", [Call("weather", GIVEN)]
    )
    text = f"<think>look it up</think>\n{TEXTS['llama3_json']}"
    assert in_every_split(text, "llama3_json", "qwen3").calls == [Call("weather", GIVEN)]


def test_values_have_the_types_of_the_schema() -> None:
    text = TEXTS["qwen3_coder"].replace("Köln <3", "5").replace("\n2\n", "\n3.0\n")
    (call,) = in_every_split(text, "qwen3_coder").calls
    assert call.arguments == '{"city": "5", "days": 3.0}'


# What a model may be asked to write, and a reader may stumble over.
HOSTILE = [
    *sorted({tag for tools in TOOL_FORMATS.values() for tag in (*tools.starts, tools.end or "")}),
    *("</parameter>", "</function>", "</arg_value>", "<parameter=x>", "<arg_key>", "<think>"),
    *(
        "</think>",
        "```",
        "\\",
        '"',
        "'",
        "\n",
        " ",
        "{",
        "}",
        "[",
        "]",
        ",",
        "é",
        "\U0001f600",
        "a",
    ),
    *("<｜tool▁call▁end｜>", "<|tool_call_end|>", "'''", '"""', "#"),
]
# Where a value itself closes all that is open, nothing tells it from the end.
CLOSING = re.compile(
    r"</parameter>\s*(<parameter=|</function>\s*(<function=|</tool_call>|$))"
    r"|</arg_value>\s*(<arg_key>|</tool_call>|$)"
)


def written(name: str, arguments: dict[str, str]) -> str:
    """A call as a family's template writes it."""
    match name:
        case "qwen3_coder":
            parts = (f"<parameter={key}>\n{arguments[key]}\n</parameter>\n" for key in arguments)
            return f"<tool_call>\n<function=weather>\n{''.join(parts)}</function>\n</tool_call>"
        case "glm45":
            parts = (
                f"<arg_key>{key}</arg_key>\n<arg_value>{arguments[key]}</arg_value>\n"
                for key in arguments
            )
            return f"<tool_call>weather\n{''.join(parts)}</tool_call>"
        case "pythonic":
            words = ", ".join(f"{key}={arguments[key]!r}" for key in arguments)
            return f"<|python_start|>[weather({words})]<|python_end|>"
    return TEXTS[name].replace(GIVEN, json.dumps(arguments, ensure_ascii=False))


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
@settings(max_examples=60)
def test_arguments_may_hold_any_tag(name: str, data: st.DataObject) -> None:
    text = st.lists(st.sampled_from(HOSTILE), max_size=8).map("".join)
    arguments = {"city": data.draw(text), "more": data.draw(text)}
    if name in {"qwen3_coder", "glm45"}:
        assume(not any(CLOSING.search(value + "\n") for value in arguments.values()))
    has_end = bool(TOOL_FORMATS[name].end)
    several = data.draw(st.integers(1, 3)) if has_end else 1
    content = "Look:" if has_end else ""
    whole = content + "\n".join([written(name, arguments)] * several)
    ends = [*sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12))), len(whole)]
    pieces = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    call = call_of(name, json.dumps(arguments, ensure_ascii=False))
    assert read(pieces, name) == Parts(content=content, calls=[call] * several)
    assert read([*whole, ""], name) == read(pieces, name) == read([whole], name)


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
@settings(max_examples=60)
def test_any_text_is_read_alike_in_every_split(name: str, data: st.DataObject) -> None:
    tags = st.sampled_from([*HOSTILE, *TEXTS.values(), "<function=weather>", "weather("])
    whole = "".join(data.draw(st.lists(tags, max_size=10)))
    reasoning = data.draw(st.sampled_from([None, "qwen3", "deepseek_r1"]))
    found = read([whole], name, reasoning)
    assert read([*whole, ""], name, reasoning) == found
    place = data.draw(st.integers(0, len(whole)))
    assert read([whole[:place], whole[place:]], name, reasoning) == found
    for call in found.calls:
        assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)
    if not found.calls and reasoning is None:
        assert found.content == whole


def test_a_tag_in_an_argument_is_part_of_it() -> None:
    arguments = '{"text": "x </tool_call> y"}'
    call = f'<tool_call>{{"name":"write","arguments":{arguments}}}</tool_call>'
    assert in_every_split(f"So: {call} z", "hermes") == Parts(
        content="So:  z", calls=[Call("write", arguments)]
    )


def test_a_call_that_is_cut_in_an_argument_is_content() -> None:
    text = 'I do. <tool_call>{"name":"write","arguments":{"text":"x </tool_call> y'
    assert in_every_split(text, "hermes") == Parts(content=text)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45"])
def test_what_is_no_call_spoils_none_that_follows(name: str) -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>'
    found = in_every_split(f"{broken} {TEXTS[name]}", name)
    assert found == Parts(content=broken, calls=[Call("weather", GIVEN)])


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("hermes", '{"a'),
        ("hermes", '{"a\\'),
        ("qwen3_coder", "<function=weather>"),
        ("qwen3_coder", "<function=weather><parameter=city>"),
        ("glm45", "weather<arg_key>"),
        ("glm45", "weather<arg_key>a</arg_key><arg_value>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>"),
        ("kimi_k2", "<|tool_call_begin|>"),
        ("pythonic", "[weather('"),
        ("pythonic", "[weather(city=" + "(" * 50),
    ],
)
def test_thousands_of_broken_calls_are_read_about_once(
    name: str, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, num_read = TOOL_FORMATS[name], 0

    def counted(text: str, schemas: Any) -> list[Call]:
        nonlocal num_read
        num_read += len(text)
        return tools.read(text, schemas)

    monkeypatch.setitem(TOOL_FORMATS, name, dataclasses.replace(tools, read=counted))
    text = f"{tools.starts[0]}{body}{tools.end}" * 1000
    pieces = [text[place : place + 50] for place in range(0, len(text), 50)]
    assert read(pieces, name) == Parts(content=text)
    assert num_read <= 4 * len(text)


@pytest.mark.parametrize(
    "text",
    [
        "[weather(city={1, 2})]",
        "[weather(city={[]: 1})]",
        "[weather(city=b'a')]",
        "[weather(city=1j)]",
        "[weather(city=1e999)]",
        "[weather(city=...)]",
        "[weather(city=" + "-" * 9000 + "1)]",
        "[weather(city=" + "[" * 9000 + ")]",
        "[weather(city='\0')]",
        "[weather('Rome')]",
        "[]",
    ],
)
def test_python_that_is_no_call_is_content(text: str) -> None:
    assert read([text], "pythonic") == Parts(content=text)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": NaN}',
        '{"city": -Infinity}',
        '["Rome"]',
        "5",
        "null",
        "[" * 5000,
    ],
)
def test_arguments_that_are_no_object_are_content(arguments: str) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    assert read([text], "hermes") == Parts(content=text)


def test_halves_of_characters_stay_escapes() -> None:
    arguments = r'{"city": "\ud800 \ud83d\ude00"}'
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    (call,) = read([text], "hermes").calls
    assert call.arguments == arguments


def test_json_that_names_no_tool_is_content_where_no_tag_stands_before_it() -> None:
    text = ' {"name": "Alice", "age": 3}\n'
    assert in_every_split(text, "llama3_json") == Parts(content=text)
    tagged = f"<|python_tag|>{text}"
    assert in_every_split(tagged, "llama3_json").calls == [Call("Alice", "{}")]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45"])
def test_a_call_of_an_unknown_tool_reaches_the_client(name: str) -> None:
    text = TEXTS[name].replace("weather", "climate")
    (call,) = in_every_split(text, name).calls
    assert (call.name, json.loads(call.arguments)["city"]) == ("climate", "Köln <3")


def test_thoughts_end_at_the_first_tag_and_begin_once() -> None:
    text = "<think>a <think> b</think> c <think>d</think> e"
    assert in_every_split(text, None, "qwen3") == Parts("a <think> b", "c <think>d</think> e")
    text = "<think>\n<think>a</think>b"
    assert in_every_split(text, None, "qwen3") == Parts("<think>a", "b")
    text = f"<think>I say {TEXTS['hermes']} then</think>{TEXTS['hermes']}"
    assert in_every_split(text, "hermes", "qwen3") == Parts(
        f"I say {TEXTS['hermes']} then", "", [Call("weather", GIVEN)]
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{%- if tools %}<tool_call>{{ x }}</tool_call>", "hermes"),
        ("<tool_call><function={{ name }}>", "qwen3_coder"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("{% if tools %}{{ tools }}{% endif %}", None),
        ("plain", "generic"),
        (None, "generic"),
    ],
)
def test_the_chat_template_says_how_calls_are_written(text: str | None, name: str | None) -> None:
    assert tool_format_of(text) is (None if name is None else TOOL_FORMATS[name])

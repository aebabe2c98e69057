"""Each family's calls and thoughts are read alike in every split of their text."""

import json
from typing import Any

import pytest

from pagedserve.server.tag_stream import Parts, TagStream
from pagedserve.server.tool_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Call,
    tool_format_of,
)

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


def test_there_is_a_text_of_each_family() -> None:
    assert TEXTS.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("name", TEXTS)
def test_a_call_is_read_in_every_split(name: str) -> None:
    wanted = Call("weather", GIVEN)
    assert in_every_split(TEXTS[name], name) == Parts(calls=[wanted])


@pytest.mark.parametrize("name", [name for name in TEXTS if TOOL_FORMATS[name].starts])
def test_text_before_a_call_is_content(name: str) -> None:
    tools = TOOL_FORMATS[name]
    text = TEXTS[name] if tools.bare_starts == () else tools.starts[0] + TEXTS[name]
    text = text if tools.end is None or text.endswith(tools.end) else text + tools.end
    found = in_every_split(f"I look. 1 < 2 [and]\n\n{text}", name)
    assert found == Parts(content="I look. 1 < 2 [and]", calls=[Call("weather", GIVEN)])


@pytest.mark.parametrize("name", BOTH)
def test_several_calls_are_read_in_every_split(name: str) -> None:
    assert in_every_split(BOTH[name], name).calls == [Call("weather", GIVEN)] * 2


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_call_is_shown_as_it_was_written(name: str) -> None:
    tools = TOOL_FORMATS[name]
    start = tools.starts[0]
    for text in (f"Use {start} so.", f"{start}no call{tools.end or ''}", f"{start}", "plain text"):
        found = in_every_split(text, name)
        assert found.calls == []
        assert "".join(found.content.split()) == "".join(text.split())


def test_text_after_a_call_is_content_too() -> None:
    found = in_every_split(f"a\n{TEXTS['hermes']}\n\nb", "hermes")
    assert found == Parts(content="ab", calls=[Call("weather", GIVEN)])


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
    assert in_every_split("thoughts </think> end", None, "deepseek_r1") == Parts("thoughts", "end")


def test_calls_come_after_thoughts() -> None:
    text = f"<think>look it up</think>\n{TEXTS['hermes']}"
    assert in_every_split(text, "hermes", "qwen3") == Parts(
        "look it up", "", [Call("weather", GIVEN)]
    )
    text = f"<think>look it up</think>\n{TEXTS['llama3_json']}"
    assert in_every_split(text, "llama3_json", "qwen3").calls == [Call("weather", GIVEN)]


def test_values_have_the_types_of_the_schema() -> None:
    text = TEXTS["qwen3_coder"].replace("Köln <3", "5").replace("\n2\n", "\ntrue\n")
    (call,) = in_every_split(text, "qwen3_coder").calls
    assert json.loads(call.arguments) == {"city": "5", "days": True}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{%- if tools %}<tool_call>{{ x }}</tool_call>", "hermes"),
        ("<tool_call><function={{ name }}>", "qwen3_coder"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("plain", None),
        (None, None),
    ],
)
def test_the_chat_template_says_how_calls_are_written(text: str | None, name: str | None) -> None:
    assert tool_format_of(text) is (None if name is None else TOOL_FORMATS[name])

"""Custom tools, whose input is a text, as OpenAI's own client sends and reads them."""

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import openai
import pytest
from llguidance import LLMatcher
from openai.types.chat import ChatCompletion
from openai.types.responses import (
    ResponseCustomToolCallInputDeltaEvent,
    ResponseCustomToolCallInputDoneEvent,
    ResponseCustomToolCallItem,
)

from pagedserve import RequestError
from pagedserve.sampling.sources import GrammarKey, Trials, compiled_source
from pagedserve.server.chat.answer_reader import AnswerReader, forced_by_choice, held_by_format
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.options import ServerArgs
from pagedserve.server.tools.custom import InputReader, with_functions
from pagedserve.server.tools.formats import TOOL_FORMATS
from pagedserve.server.tools.generic import plain_conversation
from tests.server.conftest import Served
from tests.server.test_generic_tools import may_be_written
from tests.server.test_tool_schemas import VOCABULARY
from tests.support.formula import FormulaModel

TEMPLATE: Final = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }}({{ t.function.description }})"
    "{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}={{ c.function.arguments.input }}"
    "{% endfor %};{% endfor %}|a:"
)
MESSAGES: Final[Any] = [{"role": "user", "content": "Sum."}]
DATE: Final = r"20[0-9]{2}-[01][0-9]"
LARK: Final = 'start: NUMBER ("+" NUMBER)+\nNUMBER: /[0-9]{1,2}/'
SUM: Final = r"[0-9]{1,2}(\+[0-9]{1,2})+"


def custom(name: str, **grammar: str) -> Any:
    shown = {"format": {"type": "grammar", "grammar": grammar}} if grammar else {}
    return {"type": "custom", "custom": {"name": name, "description": f"The {name}.", **shown}}


def flat(name: str, **grammar: str) -> Any:
    shown = {"format": {"type": "grammar", **grammar}} if grammar else {}
    return {"type": "custom", "name": name, "description": f"The {name}.", **shown}


def named(name: str) -> Any:
    return {"type": "custom", "custom": {"name": name}}


SHELL: Final = custom("shell")
CALENDAR: Final = custom("calendar", syntax="regex", definition=DATE)
CALCULATOR: Final = custom("calculator", syntax="lark", definition=LARK)
# What a text holds that JSON escapes, and that ends a call.
SCRIPT: Final = 'echo "</tool_call>" \\\n\t| sort > "ä😀"'


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    args = ServerArgs(
        port=0, uvicorn_log_level="warning", chat_template=TEMPLATE, tool_call_parser="hermes"
    )
    engine = {"max_model_len": 2048, "num_gpu_blocks": 1024}
    with Served(partial(FormulaModel().engine, **engine), args) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    url = f"{server.http.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **given: Any) -> Any:
    request: dict[str, Any] = {
        "model": "formula",
        "messages": MESSAGES,
        "max_tokens": 300,
        "seed": 0,
    }
    answer: Any = client.chat.completions.create(**(request | given))
    if not given.get("stream"):
        ChatCompletion.model_validate(answer.to_dict(), strict=True)
    return answer


def calls_of(client: openai.OpenAI, **given: Any) -> list[tuple[str, str]]:
    """Name and input of each call: the same of a whole response and of a stream."""
    (choice,) = ask(client, **given).choices
    assert choice.message.content is None
    calls = choice.message.tool_calls
    assert {call.type for call in calls} == {"custom"}
    assert len({call.id for call in calls}) == len(calls)
    whole = [(call.custom.name, call.custom.input) for call in calls]
    parts: list[list[str]] = []
    for chunk in ask(client, stream=True, **given):
        for delta in chunk.choices[0].delta.tool_calls or ():
            new = delta.custom
            if delta.id is not None:
                assert delta.type == "custom"
                assert delta.index == len(parts)
                parts.append([new["name"], ""])
            parts[delta.index][1] += new["input"]
    assert [(name, text) for name, text in parts] == whole
    return whole


def says(text: str) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": {"regex": re.escape(text)}}, "temperature": 0}


def call_text(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("ascii_only", [True, False])
def test_an_input_is_read_however_its_arguments_are_cut(*, ascii_only: bool) -> None:
    chance = random.Random(0)
    characters = '"\\/\n\t\0\x7f{}:,ab€\u2028\U0001f600\U0010ffff'
    for _ in range(300):
        text = "".join(chance.choices(characters, k=chance.randrange(20)))
        arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
        reader, read = InputReader(), ""
        while arguments:
            place = chance.randrange(1, 8)
            read += reader.feed(arguments[:place])
            arguments = arguments[place:]
        assert read == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "ab\\', "ab"),
        ('{"input": "ab\\ud83d', "ab"),
        (r'{"input": "a\ud83dxb rest"}', "a\ud83dxb rest"),
        (r'{"input": "a\ud83d\nb"}', "a\ud83d\nb"),
        (r'{"input": "a\ud83d"}', "a\ud83d"),
        ('{"inp', ""),
        ('{"x": 1, "input": "ab"}', "ab"),
        ('{"code": "ab"}', '{"code": "ab"}'),
        ('{"input": 7}', '{"input": 7}'),
    ],
)
def test_arguments_of_another_form_and_those_that_are_cut(arguments: str, text: str) -> None:
    assert InputReader().feed(arguments) == text
    reader = InputReader()
    assert "".join(map(reader.feed, arguments)) == text


@pytest.mark.parametrize(
    ("tool", "pattern"), [(SHELL, r"(?s:.*)"), (CALENDAR, DATE), (CALCULATOR, SUM)]
)
def test_a_tool_that_is_named_takes_the_whole_text(
    client: openai.OpenAI, tool: Any, pattern: str
) -> None:
    name = tool["custom"]["name"]
    ((called, text),) = calls_of(client, tools=[tool], tool_choice=named(name))
    assert called == name
    assert re.fullmatch(pattern, text), text


def test_required_calls_are_held_to_a_regular_expression(client: openai.OpenAI) -> None:
    for seed in range(3):
        given = {"tools": [CALENDAR], "tool_choice": "required", "seed": seed}
        calls = calls_of(client, **given, parallel_tool_calls=False)
        assert len(calls) == 1
        assert calls[0][0] == "calendar"
        assert re.fullmatch(DATE, calls[0][1])


def test_a_call_of_the_model_is_read_with_its_input(client: openai.OpenAI) -> None:
    text = call_text("shell", {"input": SCRIPT})
    assert calls_of(client, tools=[SHELL, CALENDAR], **says(text)) == [("shell", SCRIPT)]
    other = call_text("shell", {"command": "ls"})
    assert calls_of(client, tools=[SHELL], **says(other)) == [("shell", '{"command": "ls"}')]


def body_of(tools: list[Any], **given: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [], "tools": tools, **given})


def matcher_of(body: ChatBody) -> LLMatcher:
    held = forced_by_choice(body) or held_by_format(body, TOOL_FORMATS["generic"])
    assert held is not None
    key = GrammarKey("lark", held.definition, False, True)
    found = LLMatcher(VOCABULARY, compiled_source(key, Trials(lambda _: "")), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def test_a_call_that_the_grammar_holds_has_a_valid_input() -> None:
    start = matcher_of(body_of([SHELL, CALENDAR]))
    assert may_be_written(start, call_text("calendar", {"input": "2026-11"}))
    assert may_be_written(start, call_text("shell", {"input": SCRIPT}))
    for given in ("2026", "x2026-11", "2026-112"):
        assert not may_be_written(start, call_text("calendar", {"input": given}))
    assert not may_be_written(start, call_text("shell", {"input": 7}))
    assert not may_be_written(start, call_text("shell", {}))


def verbatim(text: str, name: str = "calculator") -> str:
    return f'<tool_call>\n{{"name": "{name}"}}\n{text}\n</tool_call>'


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("tools", [[CALCULATOR], [SHELL, CALCULATOR]])
def test_a_call_is_held_to_a_lark_grammar(tools: list[Any], choice: str) -> None:
    body = body_of(tools, tool_choice=choice)
    start = matcher_of(body)
    call, other = verbatim("1+23"), call_text("shell", {"input": SCRIPT})
    assert may_be_written(start, call)
    assert may_be_written(start, call.removesuffix("\n</tool_call>"))
    for text in ("1", "1+", "1+234", '{"input": "1+23"}', "1+23\n"):
        assert not may_be_written(start, verbatim(text))
    assert not may_be_written(start, call_text("calculator", {"input": "1+23"}))
    assert not may_be_written(start, f"{call}\n{call}")  # only its grammar knows where it ends
    for text in (other, f"{other}\n{call}"):
        assert may_be_written(start, text) == (SHELL in tools)
    for text in ("", "I compute.\n"):
        assert may_be_written(start, text) == (choice == "auto")
        assert may_be_written(start, text + call) == (choice == "auto" or not text)


def test_a_lark_grammar_may_have_imports_and_any_text() -> None:
    edit = 'start: "BEGIN" LF line+ "END" LF?\nline: "+" /.*/ LF\n%import common.LF'
    written = "BEGIN\n+</tool_call>\n+\nEND"
    for lark, texts in ((edit, [written, f"{written}\n"]), ("start: /(?s:.*)/", ["", SCRIPT])):
        body = body_of([SHELL, custom("edit", syntax="lark", definition=lark)])
        start = matcher_of(body)
        for text in texts:
            assert may_be_written(start, verbatim(text, "edit"))
            assert may_be_written(start, verbatim(text, "edit").removesuffix("\n</tool_call>"))


def test_an_input_may_have_any_text_and_is_read_however_it_is_cut() -> None:
    chance = random.Random(0)
    parts = ("\n</tool_call>", "</tool_", "\n", "<tool_call>", '{"name": "x"}', '"', "\\", "ä😀\0")
    body, generic = body_of([SHELL, CALCULATOR]), TOOL_FORMATS["generic"]
    for _ in range(300):
        text = "".join(chance.choices(parts, k=chance.randrange(8)))
        if text.endswith("\n</tool_call>"):
            continue  # it ends the call
        whole = f"So. {call_text('shell', {'input': 'ls'})}\n{verbatim(text)}"
        if chance.random() < 0.5:  # an end of generation ends it as well
            whole = whole.removesuffix("\n</tool_call>")
        reader = AnswerReader(body=body, tools=generic, reasoning=None, is_held=True)
        content, inputs = "", [""] * 2
        while whole:
            place = chance.randrange(1, 9)
            piece, whole = whole[:place], whole[place:]
            shown = reader.fields(0, piece, is_last=not whole, is_delta=True)
            content += shown.get("content", "")
            for call in shown.get("tool_calls", ()):
                inputs[call["index"]] += call["custom"]["input"]
        assert (content, inputs) == ("So.", ["ls", text])
        assert reader.finish_reason(0, "stop") == "tool_calls"


@pytest.mark.parametrize("tools", [[CALCULATOR], [CALENDAR, CALCULATOR]])
def test_required_calls_are_held_to_a_lark_grammar(client: openai.OpenAI, tools: list[Any]) -> None:
    patterns = {"calculator": SUM, "calendar": DATE}
    for seed in range(3):
        for name, text in calls_of(client, tools=tools, tool_choice="required", seed=seed):
            assert re.fullmatch(patterns[name], text), text


def test_the_next_turn_has_an_input_as_it_was_written() -> None:
    tools = [tool.for_template() for tool in body_of([SHELL, CALCULATOR]).usable_tools]
    calls = [
        {"id": "1", "type": "custom", "custom": {"name": "shell", "input": 'a"'}},
        {"id": "2", "type": "custom", "custom": {"name": "calculator", "input": "1+\n2"}},
    ]
    messages = with_functions([{"role": "assistant", "content": None, "tool_calls": calls}])
    system, message = plain_conversation(messages, tools, ["calculator"], has_system=True)
    calls_text = [call_text("shell", {"input": 'a"'}), verbatim("1+\n2")]
    assert message["content"] == "\n".join(calls_text)
    assert "\n\nTo call calculator, write the input as it is" in system["content"]
    assert "as it is" not in plain_conversation(messages, tools, has_system=True)[0]["content"]


def test_a_model_sees_the_tool_its_grammar_and_its_call(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "custom", "custom": {"name": "shell", "input": SCRIPT}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    answer = ask(client, messages=messages, tools=[SHELL, CALENDAR], max_tokens=1)
    grammar = f"The input must match this regular expression:\n{DATE}"
    shown = f"shell(The shell.)calendar(The calendar.\n\n{grammar})"
    shown += f"u:Sum.;a:!shell={SCRIPT};t:done;|a:"
    assert answer.usage.prompt_tokens == len(shown.encode())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": [SHELL, SHELL]}, "two tools of one name"),
        ({"tools": [SHELL], "tool_choice": named("other")}, "names 'other'; tools has shell"),
        ({"tools": [custom("a", syntax="ebnf", definition="x")]}, "'lark' or 'regex'"),
        (
            {"tools": [custom("a", syntax="regex", definition="(")], "tool_choice": named("a")},
            "tools cannot be used",
        ),
        (
            {"tools": [custom("a", syntax="lark", definition="(")], "tool_choice": named("a")},
            "tools cannot be used",
        ),
    ],
)
def test_tools_that_cannot_be_are_refused(
    client: openai.OpenAI, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        ask(client, **given)
    assert refused.value.param in {"tools", "tool_choice"}


def test_an_earlier_call_without_an_input_is_refused() -> None:
    call = {"id": "call_1", "type": "custom", "custom": {"name": "shell"}}
    with pytest.raises(RequestError, match="must be an object like"):
        with_functions([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_the_responses_api_has_items_of_its_own(client: openai.OpenAI) -> None:
    tools = [flat("shell"), flat("calendar", syntax="regex", definition=DATE)]
    given: dict[str, Any] = {"model": "formula", "input": "Sum.", "tools": tools}
    text = call_text("shell", {"input": SCRIPT}) + call_text("calendar", {"input": "2026-11"})
    answer = client.responses.create(**given, **says(text))
    calls = [ResponseCustomToolCallItem.model_validate(item.to_dict()) for item in answer.output]
    assert [(call.name, call.input) for call in calls] == [
        ("shell", SCRIPT),
        ("calendar", "2026-11"),
    ]
    with client.responses.stream(**given, **says(text)) as stream:
        events = list(stream)
        final: Any = stream.get_final_response().output
        assert [item.input for item in final] == [SCRIPT, "2026-11"]
    parts = ["", ""]
    for event in events:
        if isinstance(event, ResponseCustomToolCallInputDeltaEvent):
            parts[event.output_index] += event.delta
    done = [event for event in events if isinstance(event, ResponseCustomToolCallInputDoneEvent)]
    assert [event.input for event in done] == parts == [SCRIPT, "2026-11"]


@pytest.mark.parametrize("is_stored", [True, False])
def test_the_next_turn_has_the_call_and_its_output(
    client: openai.OpenAI, *, is_stored: bool
) -> None:
    given: dict[str, Any] = {"model": "formula", "tools": [flat("shell")], "max_output_tokens": 300}
    first = client.responses.create(
        **given, input="Sum.", **says(call_text("shell", {"input": SCRIPT}))
    )
    (call,) = first.output
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    earlier: Any = {"previous_response_id": first.id, "input": [output]}
    if not is_stored:
        earlier = {"input": [{"role": "user", "content": "Sum."}, call.to_dict(), output]}
    second = client.responses.create(**given, **earlier)
    shown = f"shell(The shell.)u:Sum.;a:!shell={SCRIPT};t:done;|a:"
    assert second.usage.input_tokens == len(shown.encode())
    if is_stored:
        items = client.responses.input_items.list(second.id, order="asc").data
        assert [item.type for item in items][-2:] == ["custom_tool_call", "custom_tool_call_output"]


def test_the_responses_api_names_and_allows_custom_tools(client: openai.OpenAI) -> None:
    tools = [flat("calendar", syntax="regex", definition=DATE), flat("shell")]
    choices: list[Any] = [
        {"type": "custom", "name": "calendar"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "calendar"}],
        },
    ]
    for choice in choices:
        answer: Any = client.responses.create(
            model="formula",
            input="When?",
            tools=tools,
            tool_choice=choice,
            max_output_tokens=300,
            parallel_tool_calls=False,
        )
        (call,) = answer.output
        assert (call.type, call.name) == ("custom_tool_call", "calendar")
        assert re.fullmatch(DATE, call.input)
    output: Any = {"type": "custom_tool_call_output", "call_id": "call_0", "output": "x"}
    with pytest.raises(openai.BadRequestError, match="no custom_tool_call of it"):
        client.responses.create(model="formula", input=[output])

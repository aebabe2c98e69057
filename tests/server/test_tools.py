"""Tool calls and thoughts as OpenAI's own client reads them, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from pagedserve.server.tools.formats import TOOL_FORMATS
from tests.server.conftest import QUICK_START, Process

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Berlin", "Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/$defs/zone"}},
    "required": ["zone"],
    "additionalProperties": False,
    "$defs": {"zone": {"enum": ["CET", "UTC"]}},
}
SCHEMAS = {"weather": WEATHER, "time": TIME}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris for 3 days?"}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
# What a model that was trained for tools would write by itself.
HERMES = (
    r"I look\.\n<tool_call>\n\{\"name\": \"weather\", \"arguments\": "
    r"\{\"city\": \"(Paris|Rome)\", \"days\": [1-7]\}\}\n</tool_call>"
)
THOUGHTS = r"<think>\nIt is (cold|warm)\.\n</think>\n\nYes\."


@pytest.fixture(scope="module")
def client(
    model_package: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """Of a server that guesses tokens besides."""
    log = tmp_path_factory.mktemp("tools") / "log"
    given = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    given += ["--enable-auto-tool-choice", "--speculative-config", '{"method": "ngram"}']
    process = Process(log, "smollm2", *QUICK_START, *given)
    process.wait_until_healthy()
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none") as client:
        yield client
    assert process.end() == 0, process.log


def ask(client: openai.OpenAI, **given: Any) -> Any:
    request: dict[str, Any] = {
        "model": "smollm2",
        "messages": MESSAGES,
        "max_tokens": 100,
        "temperature": 0,
        "tools": TOOLS,
    }
    return client.chat.completions.create(**(request | given))


def streamed(client: openai.OpenAI, **given: Any) -> dict[str, Any]:
    """A stream put together again, as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
    for chunk in ask(client, stream=True, **given):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            message["finish_reason"] = choice.finish_reason or message["finish_reason"]
            for call in choice.delta.tool_calls or ():
                known = message["calls"].setdefault(call.index, {"arguments": ""})
                known["id"] = call.id or known["id"]
                known["name"] = call.function.name or known["name"]
                known["arguments"] += call.function.arguments or ""
                assert call.id or call.function.arguments, "LangChainGo reads it as another call"
    return message


def checked(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_a_tool_that_is_named_is_called(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice=NAMED).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.type, choice.message.content) == ("weather", "function", None)
    checked("weather", call.function.arguments)
    assert choice.finish_reason == "stop"
    found = streamed(client, tool_choice=NAMED)
    assert found["calls"][0]["arguments"] == call.function.arguments
    assert found["calls"][0]["name"] == "weather"
    assert (found["finish_reason"], found["content"]) == ("stop", "")


@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_keeps_to_one_of_the_schemas(
    client: openai.OpenAI, *, parallel: bool
) -> None:
    for seed in range(3):
        given = {"temperature": 1.0, "seed": seed, "parallel_tool_calls": parallel}
        (choice,) = ask(client, tool_choice="required", **given).choices
        calls = choice.message.tool_calls
        assert len(calls) == 1 or parallel
        for call in calls:
            checked(call.function.name, call.function.arguments)
        found = streamed(client, tool_choice="required", **given)
        assert [(call["name"], call["arguments"]) for call in found["calls"].values()] == [
            (call.function.name, call.function.arguments) for call in calls
        ]
        assert found["finish_reason"] == choice.finish_reason
        assert choice.finish_reason in {"tool_calls", "length"}


def test_one_of_the_allowed_tools_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"mode": "required", "tools": [NAMED]}
    choice = {"type": "allowed_tools", "allowed_tools": choice}
    for seed in range(3):
        given = {"temperature": 1.0, "seed": seed, "parallel_tool_calls": False}
        (found,) = ask(client, tool_choice=choice, **given).choices
        (call,) = found.message.tool_calls
        assert call.function.name == "weather"
        checked("weather", call.function.arguments)
        assert found.finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_arguments_are_those_of_an_open_schema(client: openai.OpenAI, choice: Any) -> None:
    schema = {name: value for name, value in WEATHER.items() if name != "additionalProperties"}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    for seed in range(3):
        given = {"temperature": 1.0, "seed": seed, "parallel_tool_calls": False}
        (found,) = ask(client, tools=tools, tool_choice=choice, **given).choices
        checked("weather", found.message.tool_calls[0].function.arguments)


def test_a_call_that_is_cut_is_given_as_far_as_it_came(client: openai.OpenAI) -> None:
    for num_tokens in (1, 6, 12):
        given = {"tool_choice": "required", "max_tokens": num_tokens}
        (choice,) = ask(client, **given).choices
        assert choice.finish_reason == "length"
        assert not choice.message.content
        found = streamed(client, **given)
        assert (found["finish_reason"], found["content"]) == ("length", "")
        calls = [(call["name"], call["arguments"]) for call in found["calls"].values()]
        assert calls == [
            (call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
        ]
    assert calls[0][0] in SCHEMAS
    assert calls[0][1].startswith("{")


@pytest.mark.parametrize("choice", ["auto", None])
def test_a_call_that_the_model_chooses_is_read(client: openai.OpenAI, choice: str | None) -> None:
    given: dict[str, Any] = {"extra_body": {"structured_outputs": {"regex": HERMES}}}
    given |= {} if choice is None else {"tool_choice": choice}
    (found,) = ask(client, **given).choices
    (call,) = found.message.tool_calls
    assert (found.message.content, found.finish_reason) == ("I look.", "tool_calls")
    checked(call.function.name, call.function.arguments)
    assert call.id.startswith("call_")
    stream = streamed(client, **given)
    assert stream["calls"][0]["arguments"] == call.function.arguments
    assert (stream["content"], stream["finish_reason"]) == ("I look.", "tool_calls")


def test_without_a_choice_of_tools_the_text_stays_as_it_is(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"regex": HERMES}}
    (found,) = ask(client, tool_choice="none", extra_body=body).choices
    assert found.message.tool_calls is None
    assert "<tool_call>" in found.message.content
    assert found.finish_reason == "stop"


def test_thoughts_are_told_from_the_answer(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"regex": THOUGHTS}}
    (found,) = ask(client, tools=openai.NOT_GIVEN, extra_body=body).choices
    assert found.message.content == "Yes."
    assert found.message.reasoning in {"It is cold.", "It is warm."}
    assert found.message.reasoning_content == found.message.reasoning
    stream = streamed(client, tools=openai.NOT_GIVEN, extra_body=body)
    assert (stream["content"], stream["reasoning"]) == ("Yes.", found.message.reasoning)
    for hides in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        (found,) = ask(client, tools=openai.NOT_GIVEN, extra_body=body | hides).choices
        assert (found.message.content, getattr(found.message, "reasoning", None)) == ("Yes.", None)


def test_what_tools_answered_goes_back_to_the_model(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice=NAMED).choices
    (call,) = choice.message.tool_calls
    answered = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    messages = [*MESSAGES, choice.message.model_dump(exclude_none=True), answered]
    (found,) = ask(client, messages=messages, tool_choice="none").choices
    assert found.message.content


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice is 'required' without tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "none"}}},
            "tool_choice names 'none'; tools has weather, time",
        ),
        ({"tools": TOOLS * 2}, "two tools of one name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        (
            {"tool_choice": "auto", "extra_body": {"structured_outputs": {"json_object": True}}},
            "structured_outputs.json_object is given with tools that the model may choose",
        ),
        (
            {"tool_choice": "required", "extra_body": {"guided_regex": "a"}},
            "tool_choice requires a call, and another field says what the text must be",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "no"}}}
                ],
            },
            "tools",
        ),
    ],
)
def test_tools_that_cannot_be_are_refused(
    client: openai.OpenAI, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="400") as refusal:
        ask(client, **given)
    assert said in str(refusal.value)


def test_a_format_of_the_text_holds_what_is_no_call(client: openai.OpenAI) -> None:
    """As Codex and agents send an output schema with tools."""
    schema = {"name": "Weather", "strict": True, "schema": WEATHER}
    wanted = {"type": "json_schema", "json_schema": schema}
    no_tag = {"bad_words": ["<"]}  # as a model that chooses to call nothing
    (choice,) = ask(client, response_format=wanted, extra_body=no_tag).choices
    assert choice.message.tool_calls is None
    checked("weather", choice.message.content)


def test_a_model_without_tools_calls_one_that_is_named(smollm2_server: Process) -> None:
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        (choice,) = ask(client, tool_choice=NAMED).choices
        checked("weather", choice.message.tool_calls[0].function.arguments)


def test_families_of_vllm_are_known_by_their_names() -> None:
    named = {"hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek_v3", "granite"}
    assert named < TOOL_FORMATS.keys()

"""Tools of a model whose template shows none: what it is shown, and what its calls are held to."""

import json
import random
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
from llguidance import LLMatcher

from pagedserve import RequestError
from pagedserve.sampling.schemas import GrammarError
from pagedserve.sampling.sources import GrammarKey, Trials, compiled_source
from pagedserve.server.chat.answer_reader import held_by_format
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.tools.formats import TOOL_FORMATS
from pagedserve.server.tools.generic import grammar_of_calls, plain_conversation
from pagedserve.server.tools.readers import Call
from pagedserve.server.tools.tag_stream import TagStream
from tests.server.conftest import Process, Serve
from tests.server.test_tool_schemas import SCHEMAS, TOOLS, VOCABULARY
from tests.server.test_tools import MESSAGES, ask, checked, streamed
from tests.server.test_tools import SCHEMAS as OPENAI_SCHEMAS
from tests.server.test_tools import TOOLS as OPENAI_TOOLS

GENERIC = TOOL_FORMATS["generic"]


def matcher(*, several: bool = True) -> LLMatcher:
    grammar = grammar_of_calls(SCHEMAS, several=several)
    source = compiled_source(GrammarKey("lark", grammar, False, False), Trials(lambda _: ""))
    found = LLMatcher(VOCABULARY, source, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def may_be_written(start: LLMatcher, text: str) -> bool:
    grammar = start.deep_copy()
    tokens = VOCABULARY.tokenize_str(text)
    return grammar.try_consume_tokens(tokens) == len(tokens) and grammar.is_accepting()


def written(name: str, arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def test_a_call_is_held_to_the_schema_of_its_tool() -> None:
    start = matcher()
    for name, (_, valid, invalid) in TOOLS.items():
        for arguments in valid:
            assert may_be_written(start, written(name, arguments)), name
            assert may_be_written(start, f"I look.\n{written(name, arguments)}\n"), name
        for arguments in invalid:
            assert not may_be_written(start, written(name, arguments)), name
    assert not may_be_written(start, written("unknown", {}))


@pytest.mark.parametrize("several", [True, False])
def test_text_is_free_until_a_call_begins(*, several: bool) -> None:
    start, call = matcher(several=several), written("buy", {"item": "tea"})
    for text in ("", "Hello.", "<tool_cal", "<tool_response>\n{</tool_call>", "Köln 😀\n"):
        assert may_be_written(start, text)
        assert may_be_written(start, text + call)
    assert not may_be_written(start, f"{call} and more")
    for both in (call * 2, f"{call}\n{call}"):
        assert may_be_written(start, both) == several


def test_what_the_grammar_allows_is_read_as_valid_calls() -> None:
    start, chance, called = matcher(), random.Random(0), set()
    start.consume_tokens(VOCABULARY.tokenize_str("So.<tool_call>"))
    for _ in range(100):
        grammar, text = start.deep_copy(), b"So.<tool_call>"
        while not grammar.is_stopped() and not (grammar.is_accepting() and chance.random() < 0.3):
            forced = grammar.compute_ff_tokens()
            mask = grammar.compute_bitmask()
            allowed = [token for token in range(256) if mask[token // 8] >> token % 8 & 1]
            token = forced[0] if forced else chance.choice(allowed)
            grammar.consume_tokens([token])
            text += bytes([token])
            assert len(text) < 5000
        parts = TagStream(GENERIC, SCHEMAS).feed(text.decode(), is_last=True)
        assert parts.content == "So."
        assert parts.calls
        for call in parts.calls:
            called.add(call.name)
            validator = jsonschema.Draft202012Validator(SCHEMAS[call.name])
            validator.validate(json.loads(call.arguments))
    assert called == SCHEMAS.keys()


@pytest.mark.parametrize("schema", [{"not": {"required": ["a"]}}, {"propertyNames": {}}])
def test_keywords_that_grammars_do_not_know_are_left_to_the_model(schema: dict[str, Any]) -> None:
    for is_strict in (False, True):
        schemas = {"f": {"type": "object", **schema}}
        grammar = grammar_of_calls(schemas, several=True, is_strict=is_strict)
        source = compiled_source(GrammarKey("lark", grammar, False, False), Trials(lambda _: ""))
        start = LLMatcher(VOCABULARY, source, log_level=0)
        assert start.is_error() == is_strict
        assert is_strict or may_be_written(start, written("f", {"b": 1}))


def fault_of(source: str) -> str:
    return str(LLMatcher(VOCABULARY, source, log_level=0).get_error())


@pytest.mark.parametrize("pattern", ["^(?=a)b", "(?<!a)b", r"a\b", r"(a)\1"])
def test_patterns_that_grammars_do_not_know_are_left_to_the_model(pattern: str) -> None:
    text = {"a": {"type": "string", "pattern": pattern}, "n": {"type": "string", "pattern": "^n$"}}
    named = {"patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
    cases: list[tuple[dict[str, Any], object, object]] = [
        ({"properties": text}, {"a": "-", "n": "n"}, {"n": "m"}),
        (named, {"b": 1}, []),
    ]
    for schema, valid, invalid in cases:
        schemas = {"f": {"type": "object", **schema}}
        grammar = grammar_of_calls(schemas, several=True)
        source = compiled_source(GrammarKey("lark", grammar, False, True), Trials(fault_of))
        start = LLMatcher(VOCABULARY, source, log_level=0)
        assert may_be_written(start, written("f", valid))
        assert not may_be_written(start, written("f", invalid))
        strict = grammar_of_calls(schemas, several=True, is_strict=True)
        with pytest.raises(GrammarError):
            compiled_source(GrammarKey("lark", strict, False, True), Trials(fault_of))


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "float"},
        {"type": None},
        {"type": ["dict", "file"]},
        {"enum": None},
        {"type": "array", "items": None},
        {"type": "string", "minLength": None},
        {"type": "number", "minimum": None, "maximum": None},
        {"type": "object", "properties": None},
        {"type": "object", "properties": {"c": None}},
        {"type": "object", "properties": {}, "required": ["d"]},
        {"$ref": "#/components/schemas/X"},
    ],
)
def test_keywords_that_are_wrong_are_left_to_the_model(wrong: dict[str, Any]) -> None:
    held = {"type": "object", "properties": {"a": {"type": "integer"}, "b": wrong}}
    schemas = {
        "f": held | {"required": ["b", "a", "lacking"]},
        "g": {**wrong, "type": "object"},
        "h": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
    grammar = grammar_of_calls(schemas, several=True)
    source = compiled_source(GrammarKey("lark", grammar, False, True), Trials(fault_of))
    start = LLMatcher(VOCABULARY, source, log_level=0)
    values: dict[str, Any] = {"array": [], "string": "", "number": 0.5}
    value = values.get(str(wrong.get("type")), {})
    assert may_be_written(start, written("f", {"a": 1, "b": value}))
    assert may_be_written(start, written("g", {}))
    assert may_be_written(start, written("h", {"a": 1}))
    for arguments in ({"a": "x", "b": value}, {"b": value}, {"a": 1, "b": value, "c": 1}):
        assert not may_be_written(start, written("f", arguments))
    for name, other in (("h", {"a": "x"}), ("h", {}), ("g", [])):
        assert not may_be_written(start, written(name, other))
    strict = grammar_of_calls(schemas, several=True, is_strict=True)
    with pytest.raises(GrammarError):
        compiled_source(GrammarKey("lark", strict, False, True), Trials(fault_of))


@pytest.mark.parametrize("closes", [True, False])
def test_arguments_are_those_that_the_schema_names(*, closes: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"function": {"name": "f", "parameters": schema}}, {"function": {"name": "g"}}]
    body = ChatBody.model_validate({"messages": [], "tools": tools})
    held = held_by_format(body, GENERIC, closes=closes)
    assert held is not None
    assert held.disable_additional_properties == closes
    key = GrammarKey("lark", held.definition, False, held.disable_additional_properties)
    start = LLMatcher(VOCABULARY, compiled_source(key, Trials(lambda _: "")), log_level=0)
    for name, arguments in (("f", {"a": 1}), ("f", {}), ("g", {})):
        assert may_be_written(start, written(name, arguments))
    for name, arguments in (("f", {"a": 1, "x": 2}), ("f", {"x": 2}), ("g", {"x": 2})):
        assert may_be_written(start, written(name, arguments)) != closes


def call_of(name: str, arguments: object) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_conversation_with_calls_is_text() -> None:
    given = '{"city": "K\u00f6ln", "days": 2}'
    calls = [call_of("weather", given), call_of("time", {"zone": "CET"})]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": None, "tool_calls": [call_of("time", "")]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "And?"},
        {"role": "user", "content": "Well?"},
    ]
    found = plain_conversation(messages, [], has_system=True)
    assert [message["role"] for message in found] == [
        *("user", "assistant", "user", "assistant", "user", "user")
    ]
    assert found[1]["content"] == (
        f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {given}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
    )
    assert "tool_calls" not in found[1]
    texts = [part["text"] for part in found[2]["content"]]
    assert texts == [
        *("<tool_response>\nsunny\n</tool_response>", "<tool_response>", "noon"),
        "</tool_response>",
    ]
    assert found[3]["content"] == '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    assert found[4]["content"] == "<tool_response>\n</tool_response>\nAnd?"
    assert found[5] is messages[-1]
    # The text is read back as the calls.
    parts = TagStream(GENERIC, {}).feed(found[1]["content"], is_last=True)
    assert parts.calls == [Call("weather", given), Call("time", '{"zone": "CET"}')]
    with pytest.raises(RequestError, match=r"tool_calls of a message has \{\}"):
        plain_conversation([{"role": "assistant", "tool_calls": [{}]}], [], has_system=True)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_are_described_in_the_system_message(role: str) -> None:
    user = {"role": "user", "content": "How?"}
    (system, second) = plain_conversation([user], OPENAI_TOOLS, has_system=True)
    assert second is user
    assert system["role"] == "system"
    for tool in OPENAI_TOOLS:
        assert f"\n{json.dumps(tool)}\n" in system["content"]
    own = {"role": role, "content": "Be brief."}
    described = plain_conversation([own, user], OPENAI_TOOLS, has_system=True)
    assert described == [{"role": role, "content": f"Be brief.\n\n{system['content']}"}, user]
    without = plain_conversation([own, user], OPENAI_TOOLS, has_system=False)
    assert without == [own, {"role": "user", "content": f"{system['content']}\n\nHow?"}]


SHOWN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
OMITS_SYSTEM = SHOWN.replace("messages %", "messages if m.role != 'system' %")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + SHOWN


@pytest.mark.parametrize("template", [SHOWN, NO_SYSTEM, OMITS_SYSTEM])
def test_the_template_says_where_tools_are_described(serve: Serve, template: str) -> None:
    with serve({"num_gpu_blocks": 400, "max_model_len": 2048}, chat_template=template) as served:
        body = {"messages": MESSAGES, "tools": OPENAI_TOOLS, "max_tokens": 1}
        body |= {"return_token_ids": True, "tool_choice": "required"}
        answer = served.http.post("/v1/chat/completions", json=body).json()
        detokenized = served.http.post("/detokenize", json={"tokens": answer["prompt_token_ids"]})
        prompt = detokenized.json()["prompt"]
        counted = served.http.post("/tokenize", json={"messages": MESSAGES, "tools": OPENAI_TOOLS})
        assert counted.json()["tokens"] == answer["prompt_token_ids"]
        for wrong in (
            {"messages": [], "tools": OPENAI_TOOLS},
            {"prompt": "a", "tools": OPENAI_TOOLS},
            {"messages": MESSAGES, "tools": OPENAI_TOOLS * 2},
        ):
            assert served.http.post("/tokenize", json=wrong).status_code == 400
        assert prompt.startswith("[system]# Tools" if template == SHOWN else "[user]# Tools")
        assert prompt.count("</tools>\n") == 1
        assert prompt.endswith(MESSAGES[0]["content"])


def test_parameters_of_tools_that_are_not_used_are_not_checked(serve: Serve) -> None:
    wrong = {"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}
    body = {"messages": MESSAGES, "tools": [wrong], "max_tokens": 1}
    with serve({"num_gpu_blocks": 400, "max_model_len": 2048}, chat_template=SHOWN) as served:
        for choice, status in (("none", 200), ("auto", 400)):
            given = body | {"tool_choice": choice}
            assert served.http.post("/v1/chat/completions", json=given).status_code == status


def test_the_option_refuses_tools(serve: Serve) -> None:
    body = {"messages": MESSAGES, "tools": OPENAI_TOOLS, "max_tokens": 1}
    with serve(chat_template=SHOWN, generic_tool_calls=False) as served:
        answer = served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "does not say how it calls them" in answer.json()["error"]["message"]
    with serve(chat_template=SHOWN + "{{ tools }}") as served:
        assert served.http.post("/v1/chat/completions", json=body).status_code == 400


def asked(city: str, days: int) -> list[Any]:
    """A turn in which a tool was called."""
    arguments = json.dumps({"city": city, "days": days})
    return [
        {"role": "user", "content": f"Weather in {city} for {days} days?"},
        {"role": "assistant", "content": None, "tool_calls": [call_of("weather", arguments)]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "assistant", "content": "It will be sunny."},
    ]


def test_a_model_without_tools_calls_them(smollm2_server: Process) -> None:
    history = [*asked("Rome", 2), *asked("Berlin", 5)]
    history.append({"role": "user", "content": "Weather in Paris for 3 days?"})
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        for seed in range(20):
            given = {"messages": history, "temperature": 0.8, "seed": seed, "max_tokens": 60}
            (choice,) = ask(client, **given).choices
            if choice.finish_reason == "tool_calls":
                break
        (call,) = choice.message.tool_calls
        checked(call.function.name, call.function.arguments)
        found = streamed(client, **given)
        assert found["finish_reason"] == "tool_calls"
        assert found["calls"][0]["arguments"] == call.function.arguments
        assert found["content"] == (choice.message.content or "")
        answered = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        messages = [*history, choice.message.model_dump(exclude_none=True), answered]
        (last,) = ask(client, messages=messages, max_tokens=20).choices
        assert last.message.content or last.message.tool_calls
    assert "the chat template shows no tools" in smollm2_server.log
    assert smollm2_server.log.count("the chat template shows no tools") == 1


def test_the_next_turn_writes_a_required_call_as_the_model_did(smollm2_server: Process) -> None:
    """So that its tokens are found in the cache."""

    def text_of(token_ids: list[int]) -> str:
        told = httpx.post(f"{smollm2_server.url}/detokenize", json={"tokens": token_ids})
        return str(told.json()["prompt"])

    def answer(messages: list[Any]) -> dict[str, Any]:
        body = {"messages": messages, "tools": OPENAI_TOOLS, "parallel_tool_calls": False}
        body |= {"tool_choice": "required", "max_tokens": 80, "return_token_ids": True}
        url = f"{smollm2_server.url}/v1/chat/completions"
        told: dict[str, Any] = httpx.post(url, json=body | {"temperature": 0}, timeout=60).json()
        return told

    messages: list[Any] = [{"role": "user", "content": "Weather in Paris for 3 days?"}]
    first = answer(messages)
    (choice,) = first["choices"]
    (call,) = choice["message"]["tool_calls"]
    checked(call["function"]["name"], call["function"]["arguments"])
    messages += [
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    written = text_of([*first["prompt_token_ids"], *choice["token_ids"][:-1]])
    assert text_of(answer(messages)["prompt_token_ids"]).startswith(written.rstrip())


# Cities and days of earlier calls, after which the model calls a tool again.
EARLIER = (("Rome", 2), ("Berlin", 5), ("Rome", 4), ("Berlin", 1))


def test_a_model_without_tools_calls_them_in_the_messages_api(smollm2_server: Process) -> None:
    messages: list[Any] = []
    for city, days in EARLIER:
        called = {"type": "tool_use", "id": f"call_{days}", "name": "weather"}
        result = {"type": "tool_result", "tool_use_id": f"call_{days}", "content": "sunny"}
        messages += [
            {"role": "user", "content": f"Weather in {city} for {days} days?"},
            {"role": "assistant", "content": [called | {"input": {"city": city, "days": days}}]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": "It will be sunny."},
        ]
    messages.append({"role": "user", "content": "Weather in Paris for 3 days?"})
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in OPENAI_SCHEMAS.items()]
    given: dict[str, Any] = {"model": "smollm2", "max_tokens": 60, "tools": tools}
    given["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    given["extra_body"] = {"temperature": 0}
    with anthropic.Anthropic(base_url=smollm2_server.url, api_key="none") as client:
        found: Any = client.messages.create(messages=messages, **given)
        assert found.stop_reason == "tool_use"
        call = found.content[-1]
        checked(call.name, json.dumps(call.input))
        with client.messages.stream(messages=messages, **given) as stream:
            num_deltas = sum(event.type == "input_json" for event in stream)
            last: Any = stream.get_final_message().content[-1]
        assert last.input == call.input
        assert num_deltas > 1
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        messages += [
            {"role": "assistant", "content": found.content},
            {"role": "user", "content": [result]},
        ]
        assert client.messages.create(messages=messages, **given).content


def test_a_model_without_tools_calls_them_in_the_responses_api(smollm2_server: Process) -> None:
    items: list[Any] = []
    for city, days in EARLIER:
        called = {"type": "function_call", "call_id": f"call_{days}", "name": "weather"}
        items += [
            {"role": "user", "content": f"Weather in {city} for {days} days?"},
            called | {"arguments": json.dumps({"city": city, "days": days})},
            {"type": "function_call_output", "call_id": f"call_{days}", "output": "sunny"},
            {"role": "assistant", "content": "It will be sunny."},
        ]
    items.append({"role": "user", "content": "Weather in Paris for 3 days?"})
    tools: Any = [
        {"type": "function", "name": name, "parameters": schema}
        for name, schema in OPENAI_SCHEMAS.items()
    ]
    given: dict[str, Any] = {"model": "smollm2", "tools": tools, "temperature": 0}
    given |= {"max_output_tokens": 60, "store": False, "parallel_tool_calls": False}
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        found: Any = client.responses.create(input=items, **given)
        call = found.output[-1]
        assert (call.type, found.status) == ("function_call", "completed")
        checked(call.name, call.arguments)
        with client.responses.stream(input=items, **given) as stream:
            kinds = [event.type for event in stream]
            last: Any = stream.get_final_response().output[-1]
        assert last.arguments == call.arguments
        assert kinds.count("response.function_call_arguments.delta") > 1
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        items += [*found.output, output]
        assert client.responses.create(input=items, **given).output

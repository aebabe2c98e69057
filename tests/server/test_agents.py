"""What agents send beyond what a chat does: tools beside a format of the text."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from pagedserve import RequestError, SamplingParams
from pagedserve.sampling.sources import GrammarKey, Trials, compiled_source
from pagedserve.server.chat.answer_reader import AnswerReader
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.options import ServerArgs
from pagedserve.server.params import chat_params
from pagedserve.server.tools.formats import TOOL_FORMATS, ToolFormat
from tests.server.conftest import TEMPLATE, Serve, Served
from tests.server.test_generic_tools import may_be_written, written
from tests.server.test_tool_schemas import VOCABULARY
from tests.support.formula import EOS, FormulaModel, byte_tokenizer

GENERIC: Final = TOOL_FORMATS["generic"]
CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "<tool_call>"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "look", "parameters": CITY},
}
FORMAT: Final[dict[str, Any]] = {
    "type": "json_schema",
    "json_schema": {"name": "City", "strict": True, "schema": CITY},
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """Of a server whose template shows no tools."""
    args = ServerArgs(port=0, uvicorn_log_level="warning", chat_template=TEMPLATE)
    engine = {"max_model_len": 2048, "num_gpu_blocks": 1024}
    with Served(partial(FormulaModel().engine, **engine), args) as running:
        url = f"{running.http.base_url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
        running.wait_until_idle()


def test_a_format_of_the_text_does_not_concern_a_required_call(client: openai.OpenAI) -> None:
    """As instructor sends it to the Responses API, and others to chats."""
    given: dict[str, Any] = {
        "tools": [{"type": "function", "name": "look", "parameters": CITY}],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "json_schema", "name": "City", "strict": True, "schema": CITY}},
    }
    answer: Any = client.responses.create(model="formula", input="Where?", **given)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "look")
    assert json.loads(call.arguments)["name"] in CITY["properties"]["name"]["enum"]
    given = {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}
    chat: Any = client.chat.completions.create(
        model="formula",
        messages=[{"role": "user", "content": "Where?"}],
        parallel_tool_calls=False,
        **given,
    )
    (called,) = chat.choices[0].message.tool_calls
    assert json.loads(called.function.arguments)["name"] in CITY["properties"]["name"]["enum"]


# How clients know that a prompt is too long for the model.
TOO_LONG: Final = {
    "goose, Cline, opencode": r"prompt is too long",
    "litellm": r"(?i)this model's maximum context length is",
    "fantasy, of OpenAI": (
        r"maximum context length (?:is|of) (\d+) tokens.*?(?:resulted in|requested) ~?(\d+) tokens"
    ),
    "fantasy, of Anthropic": r"prompt is too long:\s*(\d+)\s*tokens?\s*>\s*(\d+)\s*maximum",
    "Zed": r"^prompt is too long: (\d+) tokens",
}


def test_a_prompt_that_is_too_long_has_the_words_by_which_clients_compact(
    client: openai.OpenAI,
) -> None:
    def refusal(size: int) -> str:
        messages: Any = [{"role": "user", "content": "a" * size}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="formula", messages=messages)
        return str(caught.value.body["message"])

    text = refusal(3000)
    found = {name: re.search(pattern, text) for name, pattern in TOO_LONG.items()}
    assert all(found.values()), (text, found)
    size, most = map(int, re.findall(r"(\d+) tokens > (\d+) maximum", text)[0])
    assert (size > 3000, most) == (True, 2047)
    assert f"has {size} tokens; max_model_len is 2048" in text
    for name in ("goose, Cline, opencode", "litellm"):
        assert re.search(TOO_LONG[name], refusal(40_000)), name


def body_of(**given: Any) -> ChatBody:
    messages = [{"role": "user", "content": "Where?"}]
    return ChatBody.model_validate({"messages": messages, "tools": [TOOL]} | given)


def matcher(
    body: ChatBody,
    tools: ToolFormat = GENERIC,
    vocabulary: LLTokenizer = VOCABULARY,
    token_ids: Collection[Sequence[int]] = (),
) -> LLMatcher:
    params = chat_params(body, SamplingParams(), tools=tools, token_ids=token_ids)
    held = params.structured_outputs
    assert held is not None
    assert held.kind == "lark"
    closes = held.disable_additional_properties
    key = GrammarKey("lark", held.definition, False, closes)
    found = LLMatcher(vocabulary, compiled_source(key, Trials(lambda _: "")), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def test_a_text_is_calls_or_json() -> None:
    start, call = matcher(body_of(response_format=FORMAT)), written("look", {"name": "Paris"})
    for text in (call, call * 2, '{"name": "Paris"}', '{"name": "<tool_call>"}'):
        assert may_be_written(start, text), text
    for text in ("", "Paris", f"So {call}", '{"name": "Rome"}', f'{{"name": "Paris"}}{call}'):
        assert not may_be_written(start, text), text
    any_object = matcher(body_of(response_format={"type": "json_object"}))
    assert may_be_written(any_object, '{"x": [1, {"y": null}]}')
    assert may_be_written(any_object, call)
    assert not may_be_written(any_object, "[1]")


# Calls of one tool in formats of families: with tags, and as JSON or a list without one.
OWN_CALLS: Final = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"name": "<tool_call>"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"name": "<tool_call>"}}]',
    "llama3_json": '{"name": "look", "parameters": {"name": "<tool_call>"}}',
    "pythonic": '[look(name="<tool_call>")]',
}


@pytest.mark.parametrize("name", OWN_CALLS)
def test_a_text_is_json_or_calls_in_the_format_of_a_family(name: str) -> None:
    known, call = TOOL_FORMATS[name], OWN_CALLS[name]
    any_object = {"type": "json_object"}
    for given, rest in ((FORMAT, '{"name": "<tool_call>"}'), (any_object, '{"a": [1, {"b": 2}]}')):
        start = matcher(body_of(response_format=given), known)
        assert may_be_written(start, call)
        assert may_be_written(start, rest)
        for text in ("", "Paris", f"So {call}", f"{rest}{call}", "[1]" * (name != "pythonic")):
            assert not may_be_written(start, text), text
    assert not may_be_written(matcher(body_of(response_format=FORMAT), known), '{"name": "Rome"}')


def test_tags_that_are_tokens_begin_calls_beside_json() -> None:
    backend = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str())
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    vocabulary = LLTokenizer(backend.to_str(), eos_token=EOS)
    tags: Any = map(backend.token_to_id, ("[TOOL_CALLS]", "[ARGS]"))
    tag, inner = tags
    body = body_of(response_format=FORMAT)
    start = matcher(body, TOOL_FORMATS["mistral"], vocabulary, [[tag]])
    for tokens, length in (
        ([tag, *b"look", inner, *b"{}", tag], 9),
        ([*b"[TOOL_CALLS]look", inner], 17),
        ([inner], 0),
        ([*b'{"name": "Paris"}', tag], 17),
    ):
        ids = [token if token > EOS else backend.encode(chr(token)).ids[0] for token in tokens]
        assert start.deep_copy().try_consume_tokens(ids) == length


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", OWN_CALLS)
def test_json_has_no_calls_of_a_family(name: str, size: int) -> None:
    texts = [OWN_CALLS[name], json.dumps({"name": OWN_CALLS["hermes"]}, indent=1)]
    for text, num_calls in zip(texts, (1, 0), strict=True):
        reader = AnswerReader(
            body=body_of(response_format=FORMAT),
            tools=TOOL_FORMATS[name],
            reasoning=None,
            is_json=True,
        )
        content, calls = "", []
        for place in range(0, len(text), size):
            is_last = place + size >= len(text)
            fields = reader.fields(0, text[place : place + size], is_last=is_last, is_delta=True)
            content += fields.get("content") or ""
            calls += fields.get("tool_calls", ())
        assert [call["function"]["name"] for call in calls] == ["look"] * num_calls
        assert content == ("" if num_calls else text)


@pytest.mark.parametrize("schema", [{"type": "array"}, {}])
def test_json_that_may_begin_as_a_call_is_refused(schema: dict[str, Any]) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "List", "schema": schema}}
    body = body_of(response_format=given)
    with pytest.raises(RequestError, match="response_format is given with tools that the model"):
        chat_params(body, SamplingParams(), tools=TOOL_FORMATS["pythonic"])
    assert may_be_written(matcher(body, TOOL_FORMATS["mistral"]), "[1]")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_json_is_content_whatever_it_holds(size: int) -> None:
    call = written("look", {"name": "<tool_call>"})
    for text, content, num_calls in (
        ('{"name": "<tool_call>"}', '{"name": "<tool_call>"}', 0),
        (call * 2, "", 2),
    ):
        reader = AnswerReader(
            body=body_of(response_format=FORMAT),
            tools=GENERIC,
            reasoning=None,
            is_held=True,
            is_json=True,
        )
        said, arguments = "", [""] * num_calls
        for place in range(0, len(text), size):
            is_last = place + size >= len(text)
            fields = reader.fields(0, text[place : place + size], is_last=is_last, is_delta=True)
            said += fields.get("content") or ""
            for delta in fields.get("tool_calls", ()):
                arguments[delta["index"]] += delta["function"]["arguments"]
        assert said == content
        assert [json.loads(each) for each in arguments] == [{"name": "<tool_call>"}] * num_calls


def test_kimis_calls_have_ids_that_name_their_tool() -> None:
    """Its template shows an earlier call by its id alone."""
    tools, id_of = TOOL_FORMATS["kimi_k2"], "functions.look:{}".format
    written_by_model = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:7"
        '<|tool_call_argument_begin|>{"name": "x"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    reader = AnswerReader(body=body_of(), tools=tools, reasoning=None)
    (call,) = reader.fields(0, written_by_model, is_last=True, is_delta=False)["tool_calls"]
    assert call["id"] == id_of(7)
    earlier = {"role": "assistant", "tool_calls": [call]}
    messages = [{"role": "user", "content": "x"}, earlier, {"role": "tool", "content": "y"}]
    body = body_of(tool_choice="required", messages=messages)
    reader = AnswerReader(body=body, tools=tools, reasoning=None)
    forced = '[{"name": "look", "parameters": {"name": "x"}}, {"name": "look", "parameters": {}}]'
    calls = reader.fields(0, forced, is_last=True, is_delta=False)["tool_calls"]
    assert [call["id"] for call in calls] == [id_of(1), id_of(2)]
    named = {"type": "function", "function": {"name": "look"}}
    reader = AnswerReader(
        body=body_of(tool_choice=named, messages=messages), tools=tools, reasoning=None
    )
    (call,) = reader.fields(0, '{"name": "x"}', is_last=True, is_delta=False)["tool_calls"]
    assert call["id"] == id_of(1)


def test_calls_of_one_response_have_different_ids() -> None:
    written_by_model = (
        "<|tool_calls_section_begin|>"
        + "<|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{}<|tool_call_end|>" * 3
        + "<|tool_calls_section_end|>"
    )
    reader = AnswerReader(body=body_of(), tools=TOOL_FORMATS["kimi_k2"], reasoning=None)
    calls = reader.fields(0, written_by_model, is_last=True, is_delta=False)["tool_calls"]
    assert [call["id"] for call in calls] == [f"functions.look:{number}" for number in (1, 2, 3)]


def test_an_id_that_would_be_too_long_to_send_back_has_no_name() -> None:
    function = {"name": "a" * 250, "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    body = body_of(tools=[tool], tool_choice=tool | {"function": {"name": "a" * 250}})
    reader = AnswerReader(body=body, tools=TOOL_FORMATS["kimi_k2"], reasoning=None)
    (call,) = reader.fields(0, "{}", is_last=True, is_delta=False)["tool_calls"]
    assert call["id"].startswith("call_")


def test_tools_and_a_format_of_the_text_together(client: openai.OpenAI) -> None:
    """As openai-agents and pydantic-ai send an output type with tools."""
    for seed in range(3):
        given: Any = {"response_format": FORMAT, "tools": [TOOL], "seed": seed, "max_tokens": 300}
        answer: Any = client.chat.completions.create(
            model="formula",
            messages=[{"role": "user", "content": "Where?"}],
            parallel_tool_calls=False,
            **given,
        )
        (choice,) = answer.choices
        calls = choice.message.tool_calls or ()
        texts = [call.function.arguments for call in calls] or [choice.message.content]
        for text in texts:
            assert json.loads(text)["name"] in CITY["properties"]["name"]["enum"]


def test_instructions_between_turns_are_served_where_the_template_refuses_them(
    serve: Serve,
) -> None:
    """As Claude Code, Codex and other agents send them, each by its API."""
    late_roles = "messages[1:] | map(attribute='role')"
    refusal = f"{{{{ raise_exception('no') if 'system' in {late_roles} | list }}}}"
    late = [{"role": "user", "content": "hello"}, {"role": "system", "content": "be brief"}]
    with serve(chat_template=refusal + TEMPLATE) as served:

        def answer(route: str, **fields: Any) -> Any:
            body = {"model": "formula", "temperature": 0} | fields
            answered = served.http.post(route, json=body)
            assert answered.status_code == 200, answered.text
            return answered.json()

        def chat(messages: list[Any]) -> Any:
            answered = answer("/v1/chat/completions", messages=messages, max_tokens=8)
            return answered["choices"][0]["message"]["content"]

        text = chat([{"role": "user", "content": "hello\n\nbe brief"}])
        assert chat(late) == text
        message = answer("/v1/messages", messages=late, max_tokens=8)
        assert message["content"][0]["text"] == text
        response = answer("/v1/responses", input=late, max_output_tokens=8)
        assert response["output"][0]["content"][0]["text"] == text


def test_ids_of_calls_have_the_length_that_a_template_requires(serve: Serve) -> None:
    """Gptel sends ids back with a prefix, and other clients those of another model's calls."""
    show = "{% if id | length != 9 %}{{ raise_exception('no') }}{% endif %}{{ id }}."
    calls = f"{{% for call in m.tool_calls or [] %}}{{% set id = call.id %}}{show}{{% endfor %}}"
    result = f"{{% if m.tool_call_id %}}{{% set id = m.tool_call_id %}}{show}{{% endif %}}"
    template = f"{{% for m in messages %}}{calls}{result}{{% endfor %}}{{# tools #}}"
    given = ("call_aB3dE5gH1", "aB3dE5gH1", "call_0123456789abcdef01234567", "toolu_x")
    shown = ("aB3dE5gH1", "aB3dE5gH1", "f01234567", "000toolux")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "look"}]
    for call_id in given:
        function = {"name": "look", "arguments": "{}"}
        call = {"id": call_id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": "seen"})
    with serve(chat_template=template, tool_call_parser="mistral") as served:
        tokens = served.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        text = served.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert text == "".join(f"{each}.{each}." for each in shown)


def test_tags_that_are_special_tokens_are_kept() -> None:
    """The routers of vLLM and SGLang request in every chat that special tokens be left out."""
    body = body_of(skip_special_tokens=True)
    for shows_tags in (True, False):
        params = chat_params(body, SamplingParams(), shows_tags=shows_tags)
        assert params.skip_special_tokens is not shows_tags

"""The Responses API as OpenAI's own client sees it, against a server of the formula."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Final

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from pagedserve.server.http.errors import ServerError
from pagedserve.server.options import ServerArgs
from pagedserve.server.responses.items import ITEMS, items_of, messages_of
from pagedserve.server.responses.protocol import ResponseObject
from pagedserve.server.responses.store import ResponseStore, Stored
from tests.server.conftest import Serve, Served
from tests.server.test_life import slowly
from tests.support.formula import EOS, FormulaModel, byte_tokenizer

# Shows all that a message may have, so that a prompt's length in bytes is known.
TEMPLATE: Final = (
    "{% if tools %}T{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}|"
    "{% endif %}{% for m in messages %}{{ m.role[0] }}"
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments.city }}"
    "{% endfor %}{% if m.tool_call_id %}={% endif %};{% endfor %}"
    "{{ verbosity }}{{ reasoning_effort }}|a:"
)
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "name": "weather",
    "description": "Look up the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME: Final[dict[str, Any]] = {
    "type": "function",
    "name": "time",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    "strict": False,
}
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
BEARER: Final = {"Authorization": "Bearer none"}
# Without whitespace, which JSON may have without end.
VISIBLE: Final = byte_tokenizer().encode("".join(map(chr, range(33, 127))))
STRICT: Final[TypeAdapter[Any]] = TypeAdapter(ResponseStreamEvent)


def served(**options: Any) -> Served:
    args = ServerArgs(
        port=0,
        uvicorn_log_level="warning",
        chat_template=TEMPLATE,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        **options,
    )
    engine = {"max_model_len": 4096, "num_gpu_blocks": 4096, "enable_prefix_caching": True}
    return Served(partial(FormulaModel().engine, **engine), args)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running
        running.wait_until_idle()


def client_of(server: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http.base_url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def says(text: str) -> dict[str, Any]:
    """Fields of a request whose response is this text."""
    return {"extra_body": {"structured_outputs": {"regex": re.escape(text)}}, "temperature": 0}


def create(client: openai.OpenAI, **given: Any) -> Any:
    request: dict[str, Any] = {"model": "formula", "input": "x", "max_output_tokens": 200}
    answer: Response = client.responses.create(**(request | given))
    checked(answer.to_dict())
    return answer


def checked(answer: Mapping[str, Any]) -> None:
    """The response is one of the client's types, strictly, and of /openapi.json."""
    Response.model_validate(answer, strict=True)
    ResponseObject.model_validate(answer)


def streamed(client: openai.OpenAI, **given: Any) -> list[Any]:
    """Events of a stream, each valid for the client's own types, in order and complete."""
    request: dict[str, Any] = {"model": "formula", "input": "x", "max_output_tokens": 200}
    create: Any = client.responses.with_streaming_response.create
    with create(**(request | given), stream=True) as raw:
        lines = list(raw.iter_lines())
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    bodies = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [body["type"] for body in bodies] == kinds
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    return [STRICT.validate_python(body) for body in bodies]


def rebuilt(events: list[Any]) -> list[tuple[str, str]]:
    """Type and text of each item, from the deltas of a stream alone."""
    items: dict[int, list[str]] = {}
    for event in events:
        if event.type == "response.output_item.added":
            items[event.output_index] = [event.item.type, ""]
        elif event.type.endswith(".delta"):
            items[event.output_index][1] += event.delta
    return [(kind, text) for kind, text in items.values()]


def text_of(item: Any) -> str:
    text: str = item.arguments if item.type == "function_call" else item.content[0].text
    return text


def test_a_response(client: openai.OpenAI) -> None:
    answer = create(client, instructions="be brief", metadata={"a": "b"}, **says("Hello."))
    assert (answer.status, answer.output_text) == ("completed", "Hello.")
    assert (answer.instructions, answer.metadata) == ("be brief", {"a": "b"})
    assert answer.usage is not None
    prompt = "s:be brief;u:x;|a:"
    assert answer.usage.input_tokens == len(prompt)
    assert answer.usage.output_tokens in {len("Hello."), len("Hello.") + 1}  # with its end
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    again = create(client, instructions="be brief", **says("Hello."))
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens >= len(prompt) - 4


def test_a_response_is_that_of_a_chat(client: openai.OpenAI, server: Served) -> None:
    given: dict[str, Any] = {"temperature": 0.7, "seed": 4, "top_p": 0.9}
    chat = client.chat.completions.create(
        model="formula",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=20,
        extra_body={"include_reasoning": True},
        **given,
    )
    seed = {"extra_body": {"seed": given.pop("seed")}}
    answer = create(client, max_output_tokens=20, **given, **seed)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.temperature, answer.top_p) == ("incomplete", 0.7, 0.9)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_events_of_a_text(client: openai.OpenAI) -> None:
    text = "Hello there. " * 12 + "Bye."
    events = streamed(client, **says(text))
    kinds = [event.type.removeprefix("response.") for event in events]
    start = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    deltas = ["output_text.delta"] * (len(kinds) - len(start) - len(end))
    assert len(deltas) > 1  # a busy server sends several tokens as one
    assert kinds == [*start, *deltas, *end]
    assert rebuilt(events) == [("message", text)]
    last = events[-1].response
    assert last.output == [events[-2].item]
    assert client.responses.retrieve(last.id).to_dict() == last.to_dict()
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_stream_of_the_client(client: openai.OpenAI) -> None:
    given: Any = {"model": "formula", "input": "x", "max_output_tokens": 200} | says("Hello.")
    with client.responses.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "Hello."
    assert kinds[-1] == "response.completed"


@pytest.mark.parametrize("tools", [[], [WEATHER]])
def test_reasoning_text_and_calls_are_items(
    client: openai.OpenAI, tools: list[dict[str, Any]]
) -> None:
    text = f"<think>\nIt is so.\n</think>\n\nI look.\n{CALL if tools else ''}"
    given = {"tools": tools, **says(text)}
    wanted = [("reasoning", "It is so."), ("message", "I look.")]
    wanted += [("function_call", '{"city": "Rome"}')] * bool(tools)
    if not tools:
        wanted[1] = ("message", "I look.\n")
    events = streamed(client, **given)
    whole = create(client, **given)
    assert rebuilt(events) == wanted
    assert [(item.type, text_of(item)) for item in whole.output] == wanted
    assert [(item.type, text_of(item)) for item in events[-1].response.output] == wanted
    assert {item.status for item in whole.output} == {"completed"}
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len("It is so.")
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == list(range(len(wanted)))
    assert [event.item for event in done] == events[-1].response.output
    for one, other in pairwise(event for event in events if hasattr(event, "output_index")):
        assert one.output_index <= other.output_index  # one item after another


class Person(BaseModel):
    name: str = Field(max_length=4)
    age: int = Field(ge=10, le=99)


def test_input_tokens_are_those_of_the_response(client: openai.OpenAI) -> None:
    first = create(client, **says("a"))
    for given in (
        {"input": "hello"},
        {"input": [{"role": "user", "content": "hello"}], "instructions": "be brief"},
        {"input": "and you?", "previous_response_id": first.id},
        {"previous_response_id": first.id},
        {"input": [{"role": "user", "content": "x" * 3000}] * 2, "truncation": "auto"},
    ):
        fields: Any = {"model": "formula"} | given
        counted = client.responses.input_tokens.count(**fields)
        assert counted.object == "response.input_tokens"
        answer = client.responses.create(**fields, max_output_tokens=1)
        assert answer.usage is not None
        assert counted.input_tokens == answer.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="no response 'resp_none' is stored"):
        client.responses.input_tokens.count(input="x", previous_response_id="resp_none")
    with pytest.raises(openai.InternalServerError, match="responses/compact is not supported"):
        client.responses.compact(model="formula", input="x")


def test_formats_of_the_text(client: openai.OpenAI) -> None:
    given: Any = {"model": "formula", "input": "x", "max_output_tokens": 100, "temperature": 0}
    given["extra_body"] = {"allowed_token_ids": [*VISIBLE, EOS]}
    parsed = client.responses.parse(text_format=Person, **given)
    person = parsed.output_parsed
    assert isinstance(person, Person)
    assert json.loads(parsed.output_text) == person.model_dump()
    with client.responses.stream(text_format=Person, **given) as stream:
        assert stream.get_final_response().output_parsed == person
    answer = create(client, text={"format": {"type": "json_object"}}, max_output_tokens=3000)
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text), dict)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "time"}),
        ({"type": "function", "name": "time"}, {"time"}),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
            {"weather"},
        ),
    ],
)
def test_calls_that_are_required(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    given: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": choice, "temperature": 0}
    answer = create(client, parallel_tool_calls=False, **given)
    (call,) = answer.output
    assert call.type == "function_call"
    assert call.name in names
    if call.name == "weather":
        assert json.loads(call.arguments)["city"] in {"Rome", "Oslo"}
    events = streamed(client, parallel_tool_calls=False, **given)
    assert rebuilt(events) == [("function_call", call.arguments)]
    assert [tool["name"] for tool in answer.to_dict()["tools"]] == ["weather", "time"]


def test_fifty_turns_with_tools(client: openai.OpenAI) -> None:
    previous: str | None = None
    asked: Any = "weather?"
    prompt = "Tweather|"
    for turn in range(50):
        calls = turn % 2 == 0
        answer = create(
            client,
            input=asked,
            tools=[WEATHER],
            previous_response_id=previous,
            **says(f"I look.\n{CALL}" if calls else "Sunny."),
        )
        previous = answer.id
        if turn % 2 == 0:
            call = answer.output[-1]
            assert call.type == "function_call"
            prompt += "u:weather?;"
            asked = [{"type": "function_call_output", "call_id": call.call_id, "output": "21"}]
        else:
            prompt += "t:21=;"
            asked = "weather?"
        assert answer.usage is not None
        assert answer.usage.input_tokens == len(f"{prompt}|a:"), turn
        prompt += "a:I look.!weatherRome;" if calls else "a:Sunny.;"
    items = list(client.responses.input_items.list(answer.id, limit=30, order="asc"))
    # Questions, texts with calls, outputs, and all answers to these but the last.
    assert len(items) == 25 + 2 * 25 + 25 + 24
    kinds = [item.type for item in items[:5]]
    assert kinds == ["message", "message", "function_call", "function_call_output", "message"]


def test_a_conversation_without_a_store(client: openai.OpenAI) -> None:
    first = create(client, store=False, tools=[WEATHER], **says(f"<think>\nSo.\n</think>\n{CALL}"))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    items: list[Any] = [{"role": "user", "content": "x"}, *(i.to_dict() for i in first.output)]
    call = first.output[-1]
    assert call.type == "function_call"
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "21"})
    answer = create(client, input=items, include=["reasoning.encrypted_content"], **says("Ok."))
    assert answer.usage is not None
    assert answer.usage.input_tokens == len("u:x;a<So.>:!weatherRome;t:21=;|a:")


@pytest.mark.parametrize("given", [{}, {"input": ""}, {"input": []}])
def test_a_response_is_continued_without_input(
    client: openai.OpenAI, given: dict[str, Any]
) -> None:
    first = create(client, **says("y"))
    answer = client.responses.create(
        model="formula", previous_response_id=first.id, max_output_tokens=1, **given
    )
    assert answer.usage is not None
    assert answer.usage.input_tokens == len("u:x;a:y;|a:")


def test_instructions_and_system_messages_are_one(client: openai.OpenAI) -> None:
    first = create(
        client,
        instructions="one",
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "two"}]},
            {"role": "user", "content": "x"},
        ],
        **says("y"),
    )
    assert first.usage is not None
    assert first.usage.input_tokens == len("s:one\n\ntwo;u:x;|a:")
    second = create(client, previous_response_id=first.id, instructions="new", **says("y"))
    assert second.usage is not None  # instructions are not carried over
    assert second.usage.input_tokens == len("s:new\n\ntwo;u:x;a:y;u:x;|a:")


def test_items_are_messages_of_a_chat() -> None:
    image = "data:image/png;base64,AA=="
    given: Any = [
        {"role": "developer", "content": "d"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "u"},
                {"type": "input_image", "image_url": image, "detail": "low"},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"a": 1, "b'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in (("c1", "f", "{}"), ("c2", "g", '{"a": 1}'))
    ]
    items = items_of(ITEMS.validate_python(given), {})
    assert messages_of("i", items) == [
        {"role": "system", "content": "i\n\nd"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "u"},
                {"type": "image_url", "image_url": {"url": image, "detail": "low"}},
            ],
        },
        {"role": "assistant", "content": "", "reasoning": "r", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "no"},
    ]
    assert len({item.id for item in items}) == len(items)


def test_reasoning_items_of_one_turn_are_joined() -> None:
    given = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
        for text in ("one, ", "two")
    ]
    assert messages_of(None, items_of(ITEMS.validate_python(given), {})) == [
        {"role": "assistant", "content": "", "reasoning": "one, two"}
    ]


def test_a_call_of_a_long_name_is_continued(client: openai.OpenAI) -> None:
    """The model made it up, so no bound of the names of tools holds for it."""
    text = CALL.replace("weather", "f" * 300)
    first = create(client, tools=[WEATHER], max_output_tokens=400, **says(text))
    (call,) = first.output
    assert call.name == "f" * 300
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    answer = create(client, previous_response_id=first.id, input=[result], **says("a"))
    assert answer.output_text == "a"


def test_any_unicode_is_answered_or_refused(server: Served) -> None:
    item = {"type": "function_call", "call_id": "\ud800", "name": "f", "arguments": "{}"}
    for body in (
        {"input": "\ud800"},
        {"input": "x", "metadata": {"\ud800": "\udfff"}},
        {"input": [{"role": "user", "content": "x", "id": "\ud800"}]},
        {"input": [item, {"role": "user", "content": "x"}]},
    ):
        answer = server.http.post(
            "/v1/responses",
            content=json.dumps({"max_output_tokens": 2} | body),
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code in {200, 400}, answer.text
        if answer.status_code == 200:
            path = f"/v1/responses/{answer.json()['id']}"
            assert server.http.get(path).json() == answer.json()
            assert server.http.get(f"{path}/input_items").status_code == 200


def test_log_probabilities(serve: Serve) -> None:
    with serve(chat_template=TEMPLATE) as server, client_of(server) as client:
        given: dict[str, Any] = {
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "temperature": 0,
            "max_output_tokens": 12,
        }
        (message,) = create(client, **given).output
        assert message.type == "message"
        (part,) = message.content
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert len(part.logprobs) == 12
        assert {len(token.top_logprobs) for token in part.logprobs} == {2}
        data = b"".join(bytes(token.bytes) for token in part.logprobs)
        assert data.decode(errors="replace") == part.text
        events = streamed(client, **given)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        tokens = [token.token for event in deltas for token in event.logprobs]
        assert tokens == [token.token for token in part.logprobs]


def test_truncation_drops_the_oldest_turns(client: openai.OpenAI) -> None:
    turns = [
        {"role": role, "content": f"{number:03}" * 20}
        for number in range(80)
        for role in ("user", "assistant")
    ]
    items: Any = [{"role": "system", "content": "s"}, *turns, {"role": "user", "content": "end"}]
    given: dict[str, Any] = {"input": items, "max_output_tokens": 10, "temperature": 0}
    with pytest.raises(openai.BadRequestError, match="tokens"):
        create(client, **given)
    answer = create(client, truncation="auto", **given)
    assert answer.usage is not None
    turn = len("u:;a:;") + 2 * 60
    fixed = len("s:s;u:end;|a:")
    kept = (4096 - 10 - fixed) // turn
    assert answer.usage.input_tokens == fixed + kept * turn
    assert answer.usage.output_tokens == 10


def test_truncation_keeps_the_last_turn_where_a_response_may_be_shorter(
    client: openai.OpenAI,
) -> None:
    items = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "x" * 200},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z" * 4000},
    ]
    answer = create(client, input=items, truncation="auto", max_output_tokens=200)
    assert answer.usage is not None
    assert answer.usage.input_tokens == len("s:s;u:;|a:") + 4000


def test_truncation_drops_turns_that_are_too_long_to_render(client: openai.OpenAI) -> None:
    turn = {"role": "user", "content": "x" * 4000}
    items: Any = [*[turn] * 20, {"role": "user", "content": "end"}]
    with pytest.raises(openai.BadRequestError, match="characters; at most 65536"):
        create(client, input=items)
    answer = create(client, input=items, truncation="auto", max_output_tokens=10)
    assert answer.usage is not None
    assert answer.usage.input_tokens == len("u:;u:end;|a:") + 4000
    long: Any = [*items, {"role": "user", "content": "x" * 70_000}]
    with pytest.raises(openai.BadRequestError, match="characters; at most 65536"):
        create(client, input=long, truncation="auto")


def test_retrieve_and_delete(client: openai.OpenAI) -> None:
    answer = create(client, **says("a"))
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="deleted, dropped"):
            call(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(answer.id)
    with pytest.raises(openai.NotFoundError) as refused:
        create(client, previous_response_id=answer.id)
    assert refused.value.param == "previous_response_id"


def test_another_key_sees_nothing(server: Served, client: openai.OpenAI) -> None:
    answer = create(client, **says("a"))
    with client_of(server, "other") as other:
        for call in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(answer.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.input_items.list(answer.id)
        with pytest.raises(openai.NotFoundError):
            create(other, previous_response_id=answer.id)
    assert client.responses.retrieve(answer.id).id == answer.id


def test_the_oldest_are_dropped() -> None:
    with served(max_stored_response_bytes=12_000) as server, client_of(server) as client:
        ids = [create(client, **says("a")).id for _ in range(10)]
        store = server.context.responses
        assert 0 < store.num_bytes <= 12_000
        answers = [server.http.get(f"/v1/responses/{name}", headers=BEARER) for name in ids]
        kept = [name for name, answer in zip(ids, answers, strict=True) if answer.is_success]
        assert {answer.status_code for answer in answers} == {200, 404}
        assert "--max-stored-response-bytes" in answers[0].text
        assert kept == ids[-len(kept) :]
        assert 1 < len(kept) < 10
        for name in kept:
            client.responses.delete(name)
        assert store.num_bytes == 0
        first = create(client, **says("a"))
        second = create(client, previous_response_id=first.id, **says("b"))
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match=first.id):
            create(client, previous_response_id=second.id)
    with served(max_stored_response_bytes=0) as server, client_of(server) as client:
        answer = create(client, **says("a"))
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)


def test_a_response_that_is_stored_is_not_in_progress() -> None:
    store, key = ResponseStore(max_bytes=0), (b"owner", "resp_1")
    store.running[key] = dict
    store.put(key, Stored(b"{}", b"[]", None))
    assert not store.running
    with pytest.raises(ServerError, match="no response 'resp_1' is stored"):
        store.get(key)


def test_cancel_ends_a_response_in_progress(serve: Serve) -> None:
    with serve({"max_model_len": 4096, "num_gpu_blocks": 2048}, chat_template=TEMPLATE) as server:
        slowly(server, 0.01)
        with client_of(server) as client:
            stream = client.responses.create(
                model="formula", input="x", stream=True, extra_body={"ignore_eos": True}
            )
            created = next(stream)
            assert created.type == "response.created"
            name = created.response.id
            shown = client.responses.retrieve(name)
            assert shown.status == "in_progress"
            with pytest.raises(openai.BadRequestError, match="cancel it first"):
                client.responses.delete(name)
            cancelled = client.responses.cancel(name)
            assert cancelled.status == "cancelled"
            checked(cancelled.to_dict())
            *_, last = stream
            assert last.type == "response.incomplete"
            assert last.response.status == "cancelled"
            assert client.responses.retrieve(name).to_dict() == last.response.to_dict()
            with pytest.raises(openai.BadRequestError, match="the response is cancelled"):
                client.responses.cancel(name)
        server.wait_until_idle()


def test_a_client_that_leaves_aborts_its_response(serve: Serve) -> None:
    with serve({"max_model_len": 4096, "num_gpu_blocks": 2048}, chat_template=TEMPLATE) as server:
        slowly(server, 0.01)
        with client_of(server) as client:
            with client.responses.create(model="formula", input="x", stream=True) as stream:
                next(stream)
            server.wait_until_idle()
        assert not server.context.responses.running


def test_a_failure_within_a_stream(serve: Serve) -> None:
    with serve(chat_template=TEMPLATE) as server, client_of(server) as client:
        executor: Any = server.engine.model_executor
        num_steps, is_begun = 0, threading.Event()

        def fail() -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps > 5:
                is_begun.wait()
                raise RuntimeError("no memory")

        executor.before_sampling = fail
        with client.responses.create(
            model="formula", input="x", max_output_tokens=50, stream=True
        ) as stream:
            events: list[Any] = [next(stream)]
            is_begun.set()
            events += stream
        for number, event in enumerate(events):
            assert STRICT.validate_python(event.to_dict()).sequence_number == number
        assert events[-1].type == "response.failed"
        failed = events[-1].response
        assert failed.status == "failed"
        assert failed.error.code == "server_error"
        kinds = Counter(event.type.removeprefix("response.") for event in events)
        assert kinds["output_item.added"] == kinds["output_item.done"] == len(failed.output) == 1
        assert kinds["content_part.added"] == kinds["content_part.done"] == 1
        assert client.responses.retrieve(failed.id).status == "failed"


REFUSALS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"input": ""}, "input", "input is empty"),
    ({"input": []}, "input", "input is empty"),
    ({"input": [{"type": "computer_call"}]}, "input", "'computer_call'"),
    ({"input": [{"type": ["message"]}]}, "input", "input.items.0.type is missing or no string"),
    ({"input": [None]}, "input", "object"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input", "role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]},
        "input",
        "input.items.0.message.content.parts.0.type is 'input_file'; accepted are",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input",
        "no function_call",
    ),
    ({"input": "x" * 70_000}, "input", "characters; at most 65536"),
    ({"input": "x" * 4200}, "input", "tokens"),
    ({"background": True}, "background", "background is True"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"temperature": -1}, "temperature", "temperature is -1"),
    ({"tools": [{"name": "weather"}]}, "tools", "tools.0.type is missing or no string; it is"),
    ({"tools": [{"type": "function"}]}, "tools", "name"),
    (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tool_choice",
        "tools has only 'web_search', which this server does not run; accepted are function",
    ),
    ({"tools": [WEATHER, WEATHER]}, "tools", "two tools of one name"),
    (
        {"tools": [{"type": "namespace", "name": "a" * 250, "tools": [WEATHER]}]},
        "tools",
        "with 259 characters; with its namespace a name may have 256",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice", "function"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "no"}},
        "tool_choice",
        "tool_choice names 'no'; tools has weather",
    ),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "no"}],
            },
        },
        "tool_choice",
        "tool_choice allows 'no'",
    ),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"text": {"format": {"type": "yaml"}}}, "text", "'yaml'"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
        "text",
        "text.format cannot be used",
    ),
    ({"reasoning": {"summary": "long"}}, "reasoning", "'detailed'"),
    ({"include": ["other"]}, "include", "include"),
    ({"top_logprobs": 2}, "include", "--reasoning-parser"),
    ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"extra_body": {"vllm_xargs": {"a": 1}}}, "vllm_xargs", "vllm_xargs is {'a': 1}"),
    ({"truncation": "middle"}, "truncation", "truncation"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "512"),
    ({"extra_body": {"max_tokens": 5}}, "max_tokens", "no field of this request"),
    ({"extra_body": {"request_id": "a"}}, "request_id", "made by the server"),
    ({"previous_response_id": "x" * 300}, "previous_response_id", "256"),
]


@pytest.mark.parametrize(("given", "param", "said"), REFUSALS)
def test_what_cannot_be_obeyed_is_refused_by_name(
    client: openai.OpenAI, given: dict[str, Any], param: str, said: str
) -> None:
    request: dict[str, Any] = {"model": "formula", "input": "x"}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**(request | given), stream=stream)
        assert said in str(refused.value)
        assert refused.value.param == param


def test_what_cannot_change_an_answer_is_passed_over(client: openai.OpenAI) -> None:
    answer = create(
        client,
        user="a",
        safety_identifier="b",
        prompt_cache_key="c",
        top_logprobs=0,
        service_tier="auto",
        max_tool_calls=3,
        reasoning={"summary": "auto"},
        background=False,
        include=["file_search_call.results"],
        **says("a"),
    )
    assert answer.output_text == "a"


def test_verbosity_and_effort_are_variables_of_the_template(client: openai.OpenAI) -> None:
    answer = create(client, text={"verbosity": "low"}, reasoning={"effort": "high"}, **says("a"))
    assert answer.usage is not None
    assert answer.usage.input_tokens == len("u:x;lowhigh|a:")


def test_images_are_for_models_that_accept_them(client: openai.OpenAI) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    with pytest.raises(openai.BadRequestError, match="image") as refused:
        create(client, input=[{"role": "user", "content": [image]}])
    assert refused.value.param == "input"


def test_unknown_models_and_other_methods(server: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        create(client, model="gpt-5")
    answer = server.http.get("/v1/responses")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert server.http.get("/v1/responses/a", params={"stream": True}).status_code == 400


def test_many_clients_at_once(server: Served) -> None:
    texts: dict[int, str] = {}

    def run(number: int) -> None:
        with client_of(server) as client:
            texts[number] = create(client, **says(f"answer {number}")).output_text

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: f"answer {number}" for number in range(12)}


def test_the_log_line(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [message for message in caplog.messages if name in message]

    caplog.set_level("INFO", "pagedserve")
    answer = httpx.post(
        f"{server.http.base_url}/v1/responses", json={"input": "x", "max_output_tokens": 2}
    )
    name = answer.json()["id"]
    server.wait_until(lambda: bool(lines()))
    (line,) = lines()
    assert re.search(r"prompts 1, prompt \d+ tokens, cached \d+, new 2, .*, length$", line)

"""Anthropic's own client against a server of the formula; other routes say what it should get."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import ModelInfo

from pagedserve.server.options import ServerArgs
from tests.server.conftest import TEMPLATE, Serve, Served
from tests.support.formula import FormulaModel

HELLO: Any = [{"role": "user", "content": "hello"}]
PDF: Any = {"type": "base64", "media_type": "application/pdf", "data": "aGk="}
GREEDY: Any = {"temperature": 0}
NO_THOUGHT: Any = {"type": "thinking", "thinking": "", "signature": ""}


def client_of(served: Served, **given: Any) -> anthropic.Anthropic:
    options: Any = {"api_key": "none", "max_retries": 0} | given
    return anthropic.Anthropic(base_url=str(served.http.base_url), **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    args = ServerArgs(port=0, uvicorn_log_level="warning", chat_template=TEMPLATE)
    with Served(lambda: FormulaModel().engine(max_model_len=200), args) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def given(**fields: Any) -> dict[str, Any]:
    more = GREEDY | fields.pop("extra_body", {})
    return {"model": "formula", "messages": HELLO, "max_tokens": 12, "extra_body": more} | fields


def chat(server: Served, **fields: Any) -> dict[str, Any]:
    """What the route of chats answers."""
    body = {"messages": HELLO, "max_tokens": 12} | GREEDY | fields
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(message: Any) -> str:
    (block,) = message.content
    text: str = block.text
    return text


# What Claude Code sends beyond the fields of a chat.
CLAUDE_CODE: Any = {
    "billing_policy": {"type": "billing_policy", "bill_to": "self"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": "msg_1"},
    "fallbacks": "default",
    "safeguards": [{"type": "dangerous_tool_use", "classifier_context": "x"}],
}
SYSTEM: Any = [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({}, {}),
        ({"system": "be brief"}, {"messages": SYSTEM + HELLO}),
        (
            {
                "system": [
                    {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "brief"},
                ]
            },
            {"messages": [{"role": "system", "content": "be\nbrief"}, *HELLO]},
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "I said"}]},
            {
                "messages": [*HELLO, {"role": "assistant", "content": "I said"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [NO_THOUGHT]}]},
            {
                "messages": [*HELLO, {"role": "assistant", "content": ""}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
        ),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": "you"}]}]},
            {"messages": [{"role": "user", "content": "hello\nyou"}]},
        ),
        (
            {"metadata": {"user_id": "7"}, "service_tier": "auto", "cache_control": None},
            {},
        ),
        ({"extra_body": {"temperature": 1.5, "top_k": 1}}, {"temperature": 1.5, "top_k": 1}),
        ({"extra_body": {"temperature": 5.0, "top_p": 1e-6}}, {"temperature": 5.0, "top_p": 1e-6}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "adaptive", "display": "updates", "block_binding": {}}}, {}),
        ({"extra_body": CLAUDE_CODE}, {}),
        ({"output_config": {"effort": "low"}}, {}),
    ],
)
def test_a_message_is_that_of_the_chat(
    server: Served, client: anthropic.Anthropic, fields: dict[str, Any], same: dict[str, Any]
) -> None:
    wanted = chat(server, **same)
    message = client.messages.create(**given(**fields))
    assert text_of(message) == wanted["choices"][0]["message"]["content"]
    assert (message.role, message.type, message.model) == ("assistant", "message", "formula")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    prompt_tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert prompt_tokens == wanted["usage"]["prompt_tokens"]
    assert usage.output_tokens == wanted["usage"]["completion_tokens"]
    counted = {name: fields[name] for name in fields.keys() & {"messages", "system", "thinking"}}
    count = client.messages.count_tokens(**{"model": "formula", "messages": HELLO} | counted)
    assert count.input_tokens == prompt_tokens


def test_models_are_listed(server: Served, client: anthropic.Anthropic) -> None:
    (listed,) = client.models.list()
    (card,) = server.http.get("/v1/models").json()["data"]
    ModelInfo.model_validate(card)
    for model in (listed, client.models.retrieve("formula")):
        assert (model.id, model.display_name, model.type) == ("formula", "formula", "model")
        assert model.created_at.timestamp() == card["created"]


def test_helpers_of_streams(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**given())
    with client.messages.stream(**given()) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
    with client.messages.stream(**given()) as stream:
        final = stream.get_final_message()
    assert text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    with client.messages.create(**given(), stream=True) as events:
        kinds = [event.type for event in events]
    deltas = ["content_block_delta"] * kinds.count("content_block_delta")
    assert kinds == [
        *("message_start", "content_block_start", *deltas, "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_events_are_in_the_order_of_the_protocol(server: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 6, "stream": True} | GREEDY
    answer = server.http.post("/v1/messages", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [event.split("\n") for event in answer.text.split("\n\n")[:-1]]
    assert all(len(lines) == 2 for lines in events)
    names = [name.removeprefix("event: ") for name, _ in events]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert names == [each["type"] for each in data]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert data[-2]["usage"]["output_tokens"] == 6


def test_stop_reasons(server: Served, client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(**given(max_tokens=20)))
    stop = next(character for character in text[3:] if character.isascii())
    message = client.messages.create(**given(max_tokens=20, stop_sequences=["unseen", stop]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]
    with client.messages.stream(**given(max_tokens=20, stop_sequences=[stop])) as stream:
        assert stream.get_final_message().stop_sequence == stop
    message = client.messages.create(**given(max_tokens=500))
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 200


def test_cached_tokens_are_counted(serve: Serve) -> None:
    engine = {"enable_prefix_caching": True, "block_size": 4}
    with serve(engine, chat_template=TEMPLATE) as served, client_of(served) as client:
        first, second = (client.messages.create(**given()).usage for _ in range(2))
        assert first.cache_read_input_tokens == first.cache_creation_input_tokens == 0
        cached = second.cache_read_input_tokens
        assert cached == (first.input_tokens - 1) // 4 * 4
        assert second.input_tokens + cached == first.input_tokens
        with client.messages.stream(**given()) as stream:
            assert stream.get_final_message().usage == second


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be greater than or equal to 1"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
            "messages.0.content.0.type is 'search_result'; accepted are",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": PDF}]}]},
            "messages.0.content.0.document.source.type is",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
            "messages.0.content.0.text.y: Extra inputs are not permitted",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages has a block of type 'thinking'",
        ),
        (
            {"thinking": {"type": "adaptive", "budget_tokens": 1024}},
            "thinking.budget_tokens is 1024 with thinking.type 'adaptive'",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.budget_tokens is given, and the model's chat template has no known tags",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": -1}},
            "budget_tokens is -1; it must be",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'any' without tools"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "zzz"}}}},
            "output_config.format cannot be used at #",
        ),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences has 65 strings"),
        ({"extra_body": {"temperature": -1}}, "temperature is -1"),
        ({"extra_body": {"container": "x"}}, "container is 'x'; it is not supported here"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers is"),
        (
            {
                "extra_body": {
                    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}
                }
            },
            'context_management.edits.0.type is "clear_tool_uses_20250919"; it must be',
        ),
        ({"extra_body": {"stop": "x"}}, "stop is no field of this request"),
        (
            {"extra_body": {"max_token": 5}},
            "max_token is no field of this request; did you mean max_tokens?",
        ),
    ],
)
def test_bad_requests_are_refused_by_name(
    client: anthropic.Anthropic, fields: dict[str, Any], said: str
) -> None:
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as refusal:
            client.messages.create(**given(**fields), stream=stream)
        check(refusal.value, 400, "invalid_request_error", said)


def check(error: anthropic.APIStatusError, status: int, kind: str, said: str) -> None:
    assert error.status_code == status
    body: Any = error.body
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert said in body["error"]["message"]
    assert body["request_id"] == error.request_id != ""


def test_other_refusals_are_the_clients_own(serve: Serve) -> None:
    with (
        serve(chat_template=TEMPLATE, api_key=("key",), max_body_bytes=4096) as served,
        client_of(served, api_key="key") as client,
        client_of(served, api_key=None, auth_token="key") as bearer,
        client_of(served, api_key="other") as other,
    ):

        def count(**fields: Any) -> Any:
            named = {"model": fields["model"], "messages": fields["messages"]}
            return client.messages.count_tokens(**named)

        for good in (client, bearer):
            assert good.messages.create(**given()).usage.output_tokens == 12
        assert count(**given()).input_tokens
        long: Any = [{"role": "user", "content": "x" * 5000}]
        for call in (client.messages.create, count):
            with pytest.raises(anthropic.NotFoundError) as missing:
                call(**given(model="other"))
            check(missing.value, 404, "not_found_error", "`other` does not exist")
            with pytest.raises(anthropic.RequestTooLargeError) as large:
                call(**given(messages=long))
            check(large.value, 413, "request_too_large", "at most 4096 bytes")
        with pytest.raises(anthropic.AuthenticationError) as denied:
            other.messages.create(**given())
        check(denied.value, 401, "authentication_error", "no valid API key")
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.batches.list()
        check(unknown.value, 404, "not_found_error", "Not Found")
        served.context.is_draining = True
        with pytest.raises(anthropic.APIStatusError) as busy:
            client.messages.create(**given())
        check(busy.value, 503, "overloaded_error", "shutting down")
        assert busy.value.response.headers["retry-after"] == "5"
        served.context.is_draining = False


def test_refusals_of_http_have_the_form_of_the_protocol(server: Served) -> None:
    for method, kind, status in (("GET", "application/json", 405), ("POST", "text/plain", 415)):
        answer = server.http.request(
            method, "/v1/messages", content=b"{}", headers={"Content-Type": kind}
        )
        check_body(answer, status)
    check_body(server.http.post("/v1/messages", json={}), 400)
    other = server.http.post("/v1/messagesx", json={})
    assert other.json()["error"]["code"] == 404


def check_body(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_an_aborted_message_is_an_error(server: Served, client: anthropic.Anthropic) -> None:
    late = given(max_tokens=150, extra_body={"timeout": 1e-6})
    with pytest.raises(anthropic.APIStatusError) as refusal:
        client.messages.create(**late)
    check(refusal.value, 503, "overloaded_error", "aborted")
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        list(client.messages.create(**late, stream=True))


def test_text_in_every_field_is_bounded_and_images_are_not(client: anthropic.Anthropic) -> None:
    long = "x" * 4000
    source = {"type": "base64", "media_type": "image/png", "data": long}
    result = {"type": "tool_result", "tool_use_id": "a", "content": long}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": long}}
    for fields in (
        {"system": long},
        {"messages": [{"role": "user", "content": [result]}]},
        {"messages": [{"role": "assistant", "content": [use]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": long}]}]},
        {"tools": [{"name": "f", "description": long, "input_schema": {"type": "object"}}]},
    ):
        with pytest.raises(anthropic.BadRequestError, match="characters; at most 3200"):
            client.messages.create(**given(**fields))
    image = {"type": "image", "source": source}
    for block in (image, result | {"content": [image]}):
        with pytest.raises(anthropic.BadRequestError, match="part of type 'image_url'"):
            client.messages.create(**given(messages=[{"role": "user", "content": [block]}]))


def test_headers_of_the_protocol_change_nothing(client: anthropic.Anthropic) -> None:
    plain = client.messages.create(**given())
    beta: Any = client.beta.messages.create(**given(), betas=["context-1m-2025-08-07"])
    assert text_of(beta) == text_of(plain)


def test_the_route_is_described_counted_and_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO", "pagedserve.server.http.request_log"),
        serve(chat_template=TEMPLATE) as served,
        client_of(served) as client,
    ):
        message = client.messages.create(**given())
        client.messages.count_tokens(model="formula", messages=HELLO)
        paths = served.http.get("/openapi.json").json()["paths"]
        assert {"/v1/messages", "/v1/messages/count_tokens"} <= paths.keys()
        metrics = served.http.get("/metrics").text
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            assert f'handler="{path}",method="POST",status="2xx"}} 1.0' in metrics
    lines = [record.getMessage() for record in caplog.records]
    assert any(
        line.startswith(f"{message.id}: prompts 1") and "new 12" in line for line in lines
    ), lines
    assert any("POST /v1/messages/count_tokens, 200" in line for line in lines), lines


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_look_for(
    server: Served,
) -> None:
    for length in (300, 100_000):
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a" * length}]}
        answer = server.http.post("/v1/messages", json=body | {"model": "formula"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["message"].startswith("prompt is too long")

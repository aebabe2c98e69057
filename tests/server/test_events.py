"""Events and lines of streams beside what ``/openapi.json`` says of them."""

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from itertools import chain
from pkgutil import resolve_name
from typing import Any, Final

import pytest

from pagedserve.server.chat import job
from pagedserve.server.options import ServerArgs
from pagedserve.server.params import chat_params
from tests.server.conftest import TEMPLATE, Serve, Served
from tests.server.test_completions import PROMPT, events
from tests.support.described import Description
from tests.support.formula import FormulaModel

HELLO: Final = [{"role": "user", "content": "hello"}]
SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {"city": {"type": "string"}}}
# A function, and a tool whose input is a text.
FUNCTION: Final = {"name": "weather", "parameters": SCHEMA}
TOOLS: Final = [
    {"type": "function", "function": FUNCTION},
    {"type": "custom", "custom": {"name": "note"}},
]
SAID: Final = (
    "<think>Cold?</think>Let me look."
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '<tool_call>{"name": "note", "arguments": {"input": "so"}}</tool_call>'
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    args = ServerArgs(
        port=0,
        uvicorn_log_level="warning",
        chat_template=TEMPLATE,
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
        enable_prompt_tokens_details=True,
        sse_keep_alive_interval=1e-9,
    )
    with Served(lambda: FormulaModel().engine(max_model_len=400), args) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def description(server: Served) -> Description:
    return Description.of(server.http)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all chats reason, speak, and call a function and a custom tool."""

    def held(body: Any, *args: Any, **more: Any) -> Any:
        body.structured_outputs = {"choice": [SAID]}
        return chat_params(body, *args, **more)

    monkeypatch.setattr(job, "chat_params", held)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "temperature": 1, "stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True, "echo": True},
    ],
)
def test_events_of_completions_and_chats(
    server: Served, description: Description, fields: dict[str, Any]
) -> None:
    body = {"stream": True, "max_tokens": 4, "temperature": 0} | fields
    completion = body | {"prompt": PROMPT, "logprobs": 2}
    description.check_events(server.http.post("/v1/completions", json=completion))
    chat = body | {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    description.check_events(server.http.post("/v1/chat/completions", json=chat))


@pytest.mark.usefixtures("calls")
def test_events_of_reasoning_and_calls(server: Served, description: Description) -> None:
    chat = {"messages": HELLO, "tools": TOOLS, "max_tokens": 300, "stream": True}
    answer = server.http.post("/v1/chat/completions", json=chat)
    for name in ("reasoning_content", "custom", "arguments"):
        assert f'"{name}":' in answer.text
    description.check_events(answer)


@pytest.mark.usefixtures("calls")
def test_a_chunk_has_reasoning_or_content_or_one_call(
    server: Served, description: Description
) -> None:
    chat = {"messages": HELLO, "tools": TOOLS, "max_tokens": 300, "stream_interval": 300}
    asked = chat | {"temperature": 0, "logprobs": True, "return_token_ids": True}
    whole = server.http.post("/v1/chat/completions", json=asked).json()["choices"][0]
    answer = server.http.post("/v1/chat/completions", json=asked | {"stream": True})
    description.check_events(answer)
    _, *choices = [event["choices"][0] for event in events(answer)]
    reasoning, content, *calls = [choice["delta"] for choice in choices if choice["delta"]]
    assert (reasoning.keys(), content.keys()) == ({"reasoning", "reasoning_content"}, {"content"})
    assert [[call["index"] for call in delta.pop("tool_calls")] for delta in calls] == [[0], [1]]
    assert calls == [{}, {}]
    *earlier, last = [choice["finish_reason"] for choice in choices]
    assert ({*earlier}, last) == ({None}, "tool_calls")
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert token_ids == whole["token_ids"]
    logprobs = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    assert list(chain.from_iterable(logprobs)) == whole["logprobs"]["content"]


@pytest.mark.parametrize("tool", TOOLS)
def test_events_of_a_named_call(
    server: Served, description: Description, tool: dict[str, Any]
) -> None:
    kind = tool["type"]
    named = {"type": kind, kind: {"name": tool[kind]["name"]}}
    chat = {"messages": HELLO, "tools": TOOLS, "tool_choice": named, "max_tokens": 9}
    answer = server.http.post("/v1/chat/completions", json=chat | {"stream": True})
    assert f'"{kind}":' in answer.text
    description.check_events(answer)


@pytest.mark.parametrize(
    ("path", "streaming", "body"),
    [
        ("completions", "job.GenerationJob", {"prompt": "x", "max_tokens": 4}),
        ("chat/completions", "job.GenerationJob", {"messages": HELLO, "max_tokens": 4}),
        ("messages", "messages.job.MessageJob", {"messages": HELLO, "max_tokens": 4}),
        ("responses", "responses.job.ResponsesJob", {"input": "x", "max_output_tokens": 4}),
    ],
)
def test_events_of_a_stream_that_fails(
    server: Served, monkeypatch: pytest.MonkeyPatch, path: str, streaming: str, body: Any
) -> None:
    kind = resolve_name(f"pagedserve.server.{streaming}")
    stream = kind._stream

    async def fail(job: Any) -> AsyncIterator[bytes]:
        async with aclosing(stream(job)) as chunks:
            yield await anext(chunks)
        raise ZeroDivisionError

    monkeypatch.setattr(kind, "_stream", fail)
    answer = server.http.post(f"/v1/{path}", json=body | {"stream": True})
    assert "ZeroDivisionError" in answer.text
    Description.of(server.http).check_events(answer)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("path", "keep_alive", "body"),
    [
        ("/v1/completions", "\n\n", {"prompt": "x", "max_tokens": 4}),
        ("/v1/chat/completions", "\n\n", {"messages": HELLO, "max_tokens": 4}),
        ("/v1/responses", "\n\n", {"input": "x", "max_output_tokens": 4}),
        ("/v1/messages", "event: ping\n", {"messages": HELLO, "max_tokens": 4}),
        ("/api/chat", "{", {"messages": HELLO, "options": {"num_predict": 4}}),
    ],
)
def test_a_stream_starts_before_a_first_event_that_takes_long(
    server: Served,
    description: Description,
    monkeypatch: pytest.MonkeyPatch,
    *,
    path: str,
    keep_alive: str,
    body: dict[str, Any],
    fails: bool,
) -> None:
    has_started = threading.Event()

    def step() -> None:
        has_started.wait()
        if fails:
            raise ZeroDivisionError

    monkeypatch.setattr(server.engine.model_executor, "before_sampling", step)
    given = body | {"model": "formula", "stream": True}
    try:
        with server.http.stream("POST", path, json=given) as answer:
            has_started.set()
            answer.read()
    finally:
        has_started.set()
    assert answer.status_code == 200
    assert answer.text.startswith(keep_alive)
    assert ("ZeroDivisionError" in answer.text) is fails
    if path == "/api/chat":
        description.check_lines(answer)
    else:
        description.check_events(answer)
    if path == "/v1/responses":
        assert "event: response.created" in answer.text


@pytest.mark.usefixtures("impatient")
def test_an_interval_of_zero_sends_no_keep_alive(serve: Serve, formula: FormulaModel) -> None:
    with serve(sse_keep_alive_interval=0) as served:
        # Some pulses pass before the first token.
        formula.executor(served.engine).before_sampling = partial(time.sleep, 0.05)
        body = {"prompt": PROMPT, "max_tokens": 2, "stream": True}
        answer = served.http.post("/v1/completions", json=body)
    assert answer.text.startswith("data: {")
    assert "\n\n\n" not in answer.text


@pytest.mark.usefixtures("calls")
def test_events_of_responses(server: Served, description: Description) -> None:
    tools = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "note"}]
    body = {"input": "hello", "tools": tools, "max_output_tokens": 300, "stream": True}
    answer = server.http.post("/v1/responses", json=body)
    for part in ("reasoning_text", "output_text", "function_call_arguments", "custom_tool_call"):
        assert f"response.{part}" in answer.text
    description.check_events(answer)
    for more, status in (
        ({"max_output_tokens": 1}, "incomplete"),
        ({"timeout": 1e-9}, "cancelled"),
    ):
        ended = server.http.post("/v1/responses", json=body | more)
        assert f'"status": "{status}"' in ended.text
        description.check_events(ended)


@pytest.mark.usefixtures("calls")
def test_events_of_messages(server: Served, description: Description) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = {"messages": HELLO, "tools": tools, "max_tokens": 300, "stream": True}
    answer = server.http.post("/v1/messages", json=body)
    for part in ("thinking_delta", "text_delta", "input_json_delta"):
        assert f'"{part}"' in answer.text
    description.check_events(answer)


@pytest.mark.usefixtures("calls")
def test_lines_of_ollamas_routes(server: Served, description: Description) -> None:
    body = {"model": "formula", "options": {"num_predict": 300}}
    chat = body | {"messages": HELLO, "tools": TOOLS[:1], "think": True}
    answer = server.http.post("/api/chat", json=chat)
    for part in ("thinking", "tool_calls"):
        assert f'"{part}"' in answer.text
    description.check_lines(answer)
    description.check_lines(server.http.post("/api/generate", json=body | {"prompt": "hello"}))

"""Ollama's own client against a server of the formula; other routes say what it should get."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from typing import Any

import ollama
import pytest

from pagedserve.server.ollama.conversion import chat_of
from pagedserve.server.ollama.protocol import OllamaChatBody, Options
from pagedserve.server.options import ServerArgs
from tests.server.conftest import TEMPLATE, Serve, Served
from tests.support.described import Description
from tests.support.formula import FormulaModel

HELLO: Any = [{"role": "user", "content": "hello"}]
OPTIONS: Any = {"temperature": 0, "num_predict": 12}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    args = ServerArgs(
        port=0,
        uvicorn_log_level="warning",
        chat_template=TEMPLATE + "{% if tools %}{{ tools[0].function.name }}{% endif %}",
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
    )
    with Served(lambda: FormulaModel().engine(max_model_len=400), args) as running:
        running.check_answers()
        yield running
        running.wait_until_idle()


@pytest.fixture
def client(server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(str(server.http.base_url)) as client:
        yield client


def other(server: Served, path: str = "chat/completions", **fields: Any) -> Any:
    """The choice that a route of OpenAI's answers with, and the usage."""
    answer = server.http.post(f"/v1/{path}", json=fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0], found["usage"]


CASES: Any = [
    ({"options": OPTIONS}, {"temperature": 0, "max_tokens": 12}),
    (
        {
            "options": {
                "temperature": 0.9,
                "num_predict": 20,
                "top_k": 9,
                "top_p": 0.9,
                "min_p": 0.01,
                "seed": 4,
                "repeat_penalty": 1.3,
                "presence_penalty": 0.2,
                "frequency_penalty": 0.1,
                "num_ctx": 4096,
                "num_thread": 3,
            },
            "keep_alive": "5m",
        },
        {
            "temperature": 0.9,
            "max_tokens": 20,
            "top_k": 9,
            "top_p": 0.9,
            "min_p": 0.01,
            "seed": 4,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.1,
        },
    ),
    (
        {
            "options": {
                "temperature": 0,
                "repeat_penalty": 1.9,
                "repeat_last_n": 0,
                "num_predict": 5,
            }
        },
        {"temperature": 0, "max_tokens": 5},
    ),
    (
        {"options": {"temperature": 0, "num_predict": -1, "stop": ["s", "x"]}},
        {"temperature": 0, "stop": ["s", "x"]},
    ),
]


@pytest.mark.parametrize(("given", "same"), CASES)
def test_chats_are_those_of_openais_route(
    server: Served, client: ollama.Client, given: Any, same: Any
) -> None:
    choice, usage = other(server, messages=HELLO, **same)
    found = client.chat("formula", HELLO, **given)
    assert found.message.role == "assistant"
    assert found.message.content == choice["message"]["content"]
    assert (found.done, found.done_reason) == (True, choice["finish_reason"])
    assert found.prompt_eval_count == usage["prompt_tokens"]
    assert found.eval_count == usage["completion_tokens"]
    assert found.total_duration is not None
    assert found.prompt_eval_duration is not None
    assert found.eval_duration is not None
    assert found.total_duration >= found.prompt_eval_duration + found.eval_duration > 0
    assert found.created_at is not None
    parts = [*client.chat("formula:latest", HELLO, stream=True, **given)]
    assert len(parts) > 1
    assert "".join(part.message.content or "" for part in parts) == found.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == (found.done_reason, found.eval_count)
    assert parts[0].model == found.model == "formula"


def test_a_response_of_one_token_has_a_duration(client: ollama.Client) -> None:
    """Clients divide the number of tokens by it."""
    found = client.chat("formula", HELLO, options={"num_predict": 1})
    assert (found.eval_count, (found.eval_duration or 0) > 0) == (1, True)


def test_generate_renders_a_prompt_or_takes_it_raw(server: Served, client: ollama.Client) -> None:
    same: Any = {"temperature": 0, "max_tokens": 12}
    system = [{"role": "system", "content": "be brief"}]
    choice, _ = other(server, messages=system + HELLO, **same)
    found = client.generate("formula", "hello", system="be brief", options=OPTIONS)
    assert found.response == choice["message"]["content"]
    parts = client.generate("formula", "hello", system="be brief", options=OPTIONS, stream=True)
    assert "".join(part.response or "" for part in parts) == found.response
    choice, usage = other(server, "completions", prompt="hello", **same)
    raw = client.generate("formula", "hello", raw=True, options=OPTIONS)
    assert (raw.response, raw.eval_count) == (choice["text"], usage["completion_tokens"])
    parts = client.generate("formula", "hello", raw=True, options=OPTIONS, stream=True)
    assert "".join(part.response or "" for part in parts) == raw.response
    whole = client.generate("formula", "hello", raw=True, options={"temperature": 0})
    assert whole.done_reason == "length"
    assert (whole.eval_count or 0) > 100  # not the 16 tokens of a completion


def test_log_probabilities(server: Served, client: ollama.Client) -> None:
    same: Any = {"temperature": 0, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    choice, _ = other(server, messages=HELLO, **same)
    options = {"temperature": 0, "num_predict": 3}
    for raw in (False, True):
        given: Any = {"logprobs": True, "top_logprobs": 2, "options": options}
        if raw:
            found: Any = client.generate("formula", "hello", raw=True, **given).logprobs
        else:
            found = client.chat("formula", HELLO, **given).logprobs
            wanted = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert [entry.logprob for entry in found] == wanted
        assert [len(entry.top_logprobs) for entry in found] == [2, 2, 2]


def test_formats_hold_the_text(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    options = {"temperature": 0, "num_predict": 60}
    found = client.chat("formula", HELLO, format=schema, options=options)
    assert json.loads(found.message.content or "")["a"] == "b"
    found = client.chat("formula", HELLO, format="json", options={"num_predict": 1, "seed": 1})
    assert (found.message.content or "").lstrip()[:1] in {"{", "[", ""}
    text = client.generate("formula", "hello", format=schema, options=options).response
    assert json.loads(text or "")["a"] == "b"


def says(server: Served, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Has the next chats say this text, which Ollama's API has no field for."""
    from pagedserve.server.ollama import conversion

    made = conversion._chat

    def held(*args: Any, **more: Any) -> Any:
        chat = made(*args, **more)
        chat.structured_outputs = {"choice": [text]}
        return chat

    monkeypatch.setattr(conversion, "_chat", held)
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_tool_calls(
    server: Served, client: ollama.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    says(server, monkeypatch, f"<think>Cold?</think>Let me look.{CALL}{CALL}")
    given: Any = {"tools": [WEATHER], "think": True, "options": {"num_predict": 300}}
    parts = (
        [*client.chat("formula", HELLO, stream=True, **given)]
        if stream
        else [client.chat("formula", HELLO, **given)]
    )
    assert "".join(part.message.thinking or "" for part in parts) == "Cold?"
    assert "".join(part.message.content or "" for part in parts) == "Let me look."
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Oslo"})
    ] * 2
    assert parts[-1].done_reason == "stop"
    found = client.chat("formula", HELLO, **given | {"think": False})
    assert found.message.thinking is None
    answered = client.generate("formula", "hello", think=True, options={"num_predict": 300})
    assert answered.thinking == "Cold?"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_have_ids_and_in_streams_lines_of_their_own(
    server: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Zed requires an id, and reads the first call of a line."""
    says(server, monkeypatch, f"Let me look.{CALL}{CALL}")
    body = {"model": "formula", "messages": HELLO, "tools": [WEATHER], "stream": stream}
    answer = server.http.post("/api/chat", json=body | {"options": {"num_predict": 300}})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    calls = [line["message"].get("tool_calls", []) for line in lines]
    assert [*map(len, calls)][-3:] == ([1, 1, 0] if stream else [2])
    made = [*chain(*calls)]
    assert len({call["id"] for call in made}) == 2
    city = {"name": "weather", "arguments": {"city": "Oslo"}}
    assert [call["function"] for call in made] == [{"index": index} | city for index in (0, 1)]


def test_a_stream_has_a_line_per_object(server: Served) -> None:
    body = {"model": "formula", "messages": HELLO, "options": OPTIONS}
    answer = server.http.post("/api/chat", json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = answer.text.removesuffix("\n").split("\n")
    assert [json.loads(line)["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = server.http.post("/api/chat", json=body | {"stream": False})
    assert whole.headers["content-type"] == "application/json"


def test_functions_are_tools_and_their_results_messages(
    server: Served, client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weather(city: str) -> str:
        """Return the weather.

        Args:
            city: Name of the city.
        """
        return f"cold in {city}"

    says(server, monkeypatch, CALL)
    found = client.chat("formula", HELLO, tools=[weather], options={"num_predict": 300})
    (call,) = found.message.tool_calls or ()
    result = {"role": "tool", "tool_name": "weather", "content": weather("Oslo")}
    assert call.function.arguments == {"city": "Oslo"}
    monkeypatch.undo()
    messages: Any = [*HELLO, found.message, result]
    same = [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call00000",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {
            "role": "tool",
            "name": "weather",
            "tool_call_id": "call00000",
            "content": "cold in Oslo",
        },
    ]
    choice, _ = other(server, messages=same, temperature=0, max_tokens=12)
    again = client.chat("formula", messages, options=OPTIONS)
    assert again.message.content == choice["message"]["content"]


@pytest.mark.parametrize("kind", ["", "object"])
def test_tools_of_the_client_in_go_need_no_parameters(
    server: Served, client: ollama.Client, kind: str
) -> None:
    tool: Any = {"name": "now", "parameters": {"type": kind, "properties": None}}
    body = {"model": "formula", "messages": HELLO, "options": OPTIONS, "stream": False}
    answer = server.http.post("/api/chat", json=body | {"tools": [{"function": tool}]})
    assert answer.status_code == 200, answer.text
    given = {"model": "formula", "tools": [{"type": "function", "function": tool}]}
    (read,) = OllamaChatBody.model_validate(given).tools
    assert read.parameters == {"type": "object", "properties": {}}


def test_results_belong_to_calls_by_id_then_name_then_order() -> None:
    calls = [{"id": name * 2, "function": {"name": name}} for name in "abc"]
    calls.append({"id": "other", "function": {"name": "c"}})
    results = [{"tool_call_id": "other"}, {"tool_name": "b"}, {}, {"tool_call_id": "unknown"}]
    given = [
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "content": "1"} | result for result in results),
    ]
    body = {"model": "formula", "messages": given}
    asked, *answered = chat_of(OllamaChatBody.model_validate(body), max_num_chars=10_000).messages
    ids = [call["id"] for call in asked["tool_calls"]]
    assert len(set(ids)) == len(ids)
    found = [(message["name"], ids.index(message["tool_call_id"])) for message in answered]
    assert found == [("c", 3), ("b", 1), ("a", 0), ("c", 2)]


@pytest.mark.parametrize("name", ["", "f" * 300])
def test_any_name_of_a_call_is_accepted(name: str) -> None:
    """The model made it up, so no bound of the names of tools holds for it."""
    given = [
        {"role": "assistant", "tool_calls": [{"function": {"name": name}}]},
        {"role": "tool", "tool_name": name, "content": "1"},
    ]
    body = {"model": "formula", "messages": given}
    called, returned = chat_of(OllamaChatBody.model_validate(body), max_num_chars=10_000).messages
    assert called["tool_calls"][0]["function"]["name"] == name
    assert returned["tool_call_id"] == called["tool_calls"][0]["id"]


def test_roles_may_be_in_capitals() -> None:
    given = [{"role": "System", "content": "a"}, {"role": "USER", "content": "b"}]
    body = {"model": "formula", "messages": given}
    found = chat_of(OllamaChatBody.model_validate(body), max_num_chars=10_000).messages
    assert [message["role"] for message in found] == ["system", "user"]


def test_consecutive_messages_of_a_role_are_one() -> None:
    """Templates that alternate between roles refuse two; some clients send reasoning apart."""
    calls = [{"function": {"name": name}} for name in "ab"]
    given = [
        {"role": "user", "content": "What is this?"},
        {"role": "user", "content": "And this?", "images": ["aGk="]},
        {"role": "thinking", "content": "hm"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        *({"role": "tool", "content": result} for result in "12"),
        *({"role": "user", "content": text} for text in ("And", "", "now?")),
    ]
    body = {"model": "formula", "messages": given}
    found = chat_of(OllamaChatBody.model_validate(body), max_num_chars=10_000).messages
    roles = ["user", "assistant", "tool", "tool", "user"]
    assert [message["role"] for message in found] == roles
    asked, answered, *_, last = found
    assert [part["type"] for part in asked["content"]] == ["text", "image_url", "text"]
    assert (answered["reasoning"], answered["content"]) == ("hm", "I look.")
    assert len(answered["tool_calls"]) == 2
    assert last["content"] == "And\n\nnow?"


def test_a_last_message_of_the_assistant_is_continued(
    server: Served, client: ollama.Client
) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "I said"}]
    same: Any = {"add_generation_prompt": False, "continue_final_message": True}
    choice, _ = other(server, messages=messages, temperature=0, max_tokens=12, **same)
    found = client.chat("formula", messages, options=OPTIONS)
    assert found.message.content == choice["message"]["content"]


def test_a_last_message_with_calls_is_not_continued() -> None:
    call = {"function": {"name": "weather", "arguments": {}}}
    messages = [*HELLO, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    body = {"model": "formula", "messages": messages}
    chat = chat_of(OllamaChatBody.model_validate(body), max_num_chars=10_000)
    assert (chat.continue_final_message, chat.add_generation_prompt) == (False, True)
    assert chat.messages[-1]["tool_calls"]


def test_models_are_listed_and_described(client: ollama.Client, server: Served) -> None:
    (model,) = client.list().models
    assert model.model == "formula"
    assert len(model.digest or "") == 64
    assert model.size == 3_000
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.digest) == (model.model, model.digest)
    assert (loaded.size, loaded.size_vram, loaded.context_length) == (4_000, 0, 400)
    assert loaded.expires_at is not None
    assert loaded.expires_at.year > 2100
    (card,) = server.http.get("/api/tags").json()["models"]
    unknown = dict.fromkeys(("format", "family", "parameter_size", "quantization_level"), "")
    assert card["details"] == unknown | {"parent_model": "", "families": []}
    shown = client.show("formula:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo["pagedserve.context_length"] == 400
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert (shown.template or "").startswith(TEMPLATE)


def test_the_model_runs_forever(client: ollama.Client) -> None:
    (model,) = client.ps().models
    (listed,) = client.list().models
    assert (model.model, model.digest) == (listed.model, listed.digest)
    assert model.context_length == 400
    assert model.expires_at is not None
    assert model.expires_at.year > 2100


def test_a_generative_model_embeds_nothing(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="the model generates"):
        client.embed("formula", "x")


def test_the_version_is_that_of_ollama(server: Served) -> None:
    """VS Code's Copilot accepts none before 0.6.4."""
    version = server.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


def test_show_accepts_the_body_of_the_client_in_go(server: Served) -> None:
    empty = {"system": "", "template": "", "verbose": False, "options": None, "name": ""}
    shown = server.http.post("/api/show", json={"model": "formula"}).json()
    answer = server.http.post("/api/show", json={"model": "formula"} | empty)
    assert (answer.status_code, answer.json()) == (200, shown)


@pytest.mark.parametrize("num_turns", [9, 99])
def test_the_oldest_turns_of_a_long_chat_are_dropped(client: ollama.Client, num_turns: int) -> None:
    turn = [{"role": role, "content": "x" * 95} for role in ("user", "assistant")]
    system = [{"role": "system", "content": name} for name in "st"]
    messages: Any = [*system, *turn * num_turns, *HELLO]
    found = client.chat("formula", messages, options=OPTIONS)
    kept: Any = [*system, *turn, *HELLO]
    same = client.chat("formula", kept, options=OPTIONS)
    assert found.prompt_eval_count == same.prompt_eval_count
    assert found.message.content == same.message.content
    body = {"model": "formula", "messages": messages, "truncate": False}
    with pytest.raises(ollama.ResponseError, match=r"tokens|characters") as refused:
        client._request(ollama.ChatResponse, "POST", "/api/chat", json=body)
    assert refused.value.status_code == 400


def test_a_request_without_a_prompt_loads_the_model(client: ollama.Client) -> None:
    found = client.chat("formula")
    assert (found.done, found.done_reason, found.message.content) == (True, "load", "")
    (part,) = client.generate("formula", stream=True, keep_alive=0)
    assert (part.done, part.done_reason, part.response) == (True, "load", "")


def test_the_asynchronous_client(server: Served) -> None:
    import asyncio

    async def run() -> tuple[str, str]:
        async with ollama.AsyncClient(str(server.http.base_url)) as client:
            whole = await client.chat("formula", HELLO, options=OPTIONS)
            stream = await client.chat("formula", HELLO, options=OPTIONS, stream=True)
            return whole.message.content or "", "".join(
                [part.message.content or "" async for part in stream]
            )

    whole, streamed = asyncio.run(run())
    assert whole == streamed != ""


@pytest.mark.parametrize(
    ("given", "status", "error"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist; "),
        ({"options": {"typical_p": 0.7}}, 400, "options.typical_p is 0.7"),
        ({"options": {"temperature": -1}}, 400, "options.temperature is -1.0"),
        ({"options": {"num_predict": 0}}, 400, "options.num_predict is 0"),
        ({"format": "xml"}, 400, "format"),
        ({"format": {"type": "no"}}, 400, "format"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400, "images"),
        ({"messages": [{"role": "user", "content": [1]}]}, 400, "messages.0.content"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(
    server: Served, given: dict[str, Any], status: int, error: str
) -> None:
    for stream in (False, True):
        body = {"model": "formula", "messages": HELLO, "stream": stream} | given
        answer = server.http.post("/api/chat", json=body)
        assert answer.status_code == status
        assert error in answer.json()["error"]


@pytest.mark.parametrize(
    "given",
    [
        {"options": {"useMLock": True, "numCtx": 4096, "rope_frequency_base": 1e4}},
        {"options": {"draft_num_predict": 4, "num_gqa": 1, "num_ctx": -1}},
        {"options": {"mirostat": 1, "mirostat_tau": 5, "tfs_z": 0.9, "penalize_newline": False}},
        {"options": {"stop": [""]}},
        {"options": {"stop": ""}},
        {"messages": [HELLO[0] | {"name": "Ann"}]},
        {"system": "x", "metadata": {}, "template": "{{ .Prompt }}", "keep_alive": 1},
    ],
)
def test_what_ollama_passes_over_changes_nothing(server: Served, given: dict[str, Any]) -> None:
    body: Any = {"model": "formula", "messages": HELLO, "stream": False, "options": OPTIONS}
    same = server.http.post("/api/chat", json=body).json()
    more = {"options": OPTIONS | given.get("options", {})}
    answer = server.http.post("/api/chat", json=body | given | more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["message"] == same["message"]


def test_unknown_options_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Options.model_validate({"temprature": 1, "num_gpu": 1, "top_k": 3})
    assert [record.message for record in caplog.records] == [
        "the unknown option 'temprature' of Ollama's API has no effect"
    ]


@pytest.mark.parametrize(("given", "same"), [(0, {"top_k": 1}), (2, {"top_p": 1})])
def test_any_top_p_is_accepted(client: ollama.Client, given: float, same: Any) -> None:
    options: Any = {"temperature": 0.9, "seed": 3, "num_predict": 12}
    found = client.chat("formula", HELLO, options=options | {"top_p": given})
    assert found.message == client.chat("formula", HELLO, options=options | same).message


def test_a_window_of_the_repeat_penalty_is_that_of_all_tokens(client: ollama.Client) -> None:
    """64 is Ollama's default, which some clients always send."""
    options: Any = OPTIONS | {"repeat_penalty": 1.9}
    found = client.chat("formula", HELLO, options=options | {"repeat_last_n": 64})
    assert found.message == client.chat("formula", HELLO, options=options).message


def test_more_refusals(server: Served, serve: Serve) -> None:
    raw = {"model": "formula", "prompt": "a", "raw": True, "system": "b"}
    answer = server.http.post("/api/generate", json=raw)
    assert (answer.status_code, answer.json()["error"].split(",")[0]) == (
        400,
        "system is given with raw",
    )
    raw = {"model": "formula", "prompt": "a", "raw": True, "options": {"num_predict": 0}}
    answer = server.http.post("/api/generate", json=raw)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("options.num_predict is 0")
    for name, value in (("template", "{{ .Prompt }}"), ("context", [1, 2]), ("suffix", "b")):
        body = {"model": "formula", "prompt": "a", name: value}
        error = server.http.post("/api/generate", json=body).json()["error"]
        assert error == f"{name} is {value!r}; it is not supported here"
    long = {"model": "formula", "prompt": "a" * 7000}
    assert "7000 characters" in server.http.post("/api/generate", json=long).json()["error"]
    answer = server.http.post("/api/pull", json={"model": "formula"})
    assert (answer.status_code, answer.json()) == (501, {"error": "api/pull is not supported here"})
    with serve(api_key=["secret"]) as closed:
        with (
            ollama.Client(str(closed.http.base_url)) as client,
            pytest.raises(ollama.ResponseError, match="no valid API key"),
        ):
            client.list()
        headers = {"Authorization": "Bearer secret"}
        with ollama.Client(str(closed.http.base_url), headers=headers) as client:
            assert client.list().models[0].model == "formula"
            with pytest.raises(ollama.ResponseError, match="think is True, and the server") as no:
                client.chat("formula", HELLO, think=True)
            assert no.value.status_code == 400


def test_an_error_within_a_stream_is_its_last_line(
    server: Served, client: ollama.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedserve.server.ollama.job import OllamaJob

    # Not after the engine's first output, which may be its last if the server has waited.
    async def fail(job: OllamaJob) -> AsyncIterator[bytes]:
        yield job._line({"content": "first"}, {}).encode()
        raise ZeroDivisionError

    monkeypatch.setattr(OllamaJob, "_lines", fail)
    got: list[ollama.ChatResponse] = []
    parts = client.chat("formula", HELLO, options=OPTIONS, stream=True)
    with pytest.raises(ollama.ResponseError, match="ZeroDivisionError"):
        got.extend(parts)
    assert [(part.message.content, part.done) for part in got] == [("first", False)]
    answer = server.http.post("/api/chat", json={"model": "formula", "messages": HELLO})
    Description.of(server.http).check_lines(answer)
    assert server.context.client.is_running


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", '"nan"'])
def test_numbers_of_options_are_finite(server: Served, number: str) -> None:
    options = f'{{"temperature": {number}}}'
    body = f'{{"model": "formula", "prompt": "hello", "options": {options}}}'
    headers = {"Content-Type": "application/json"}
    answer = server.http.post("/api/generate", content=body, headers=headers)
    assert answer.status_code == 400
    assert re.search("it must be (a )?finite", answer.json()["error"])


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://elsewhere.example"}])
def test_a_body_needs_no_type_except_from_a_browser(
    server: Served, headers: dict[str, str]
) -> None:
    """As litellm sends it; a page of another origin could send it without being allowed to."""
    body = {"model": "formula", "messages": HELLO, "options": OPTIONS, "stream": False}
    answer = server.http.post("/api/chat", content=json.dumps(body).encode(), headers=headers)
    assert answer.status_code == (415 if headers else 200), answer.text
    if not headers:
        assert answer.json()["eval_count"] == 12

"""Requests of agents' programs to the Responses API: their fields, tools and items."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.conftest import Served
from tests.server.test_responses import (
    CALL,
    TIME,
    WEATHER,
    client_of,
    create,
    says,
    served,
    streamed,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def test_fields_of_the_codex_cli_are_passed_over(client: openai.OpenAI) -> None:
    """Fields of every request that it sends, and of newer versions of it."""
    regex = says("a")["extra_body"]
    answer = create(
        client,
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="c",
        reasoning={"effort": "max", "summary": "concise", "context": "all_turns"},
        stream_options={"reasoning_summary_delivery": "sequential_cutoff"},
        extra_body=regex
        | {
            "client_metadata": {"x-codex-installation-id": "i"},
            "access_programs": {"cyber": "standard"},
        },
    )
    assert answer.output_text == "a"


def test_tools_of_other_types_are_left_out(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pagedserve")
    others = [{"type": "local_shell"}, {"type": "image_generation", "output_format": "png"}]
    for _ in range(2):
        answer = create(client, tools=[*others, WEATHER], **says("a"))
        assert [tool.name for tool in answer.tools] == ["weather"]
        assert answer.usage.input_tokens == len("Tweather|u:x;|a:")
    (line,) = (message for message in caplog.messages if "'local_shell'" in message)
    assert line.startswith("tools of type 'local_shell' are left out")
    answer = create(client, tools=others, **says("a"))
    assert (answer.tools, answer.usage.input_tokens) == ([], len("u:x;|a:"))


def test_tools_in_namespaces(client: openai.OpenAI) -> None:
    inner = WEATHER | {"defer_loading": False}
    tools = [
        {"type": "namespace", "name": name, "description": "d", "tools": [inner]}
        for name in ("mcp__sky", "mcp__sea__")
    ]
    given = {"tools": [*tools, TIME], **says(CALL.replace("weather", "mcp__sea__weather"))}
    answer = create(client, **given)
    shown = "Tmcp__sky__weather,mcp__sea__weather,time|"
    assert answer.usage.input_tokens == len(f"{shown}u:x;|a:")
    assert [tool.name for tool in answer.tools] == ["mcp__sky", "mcp__sea__", "time"]
    (call,) = answer.output
    assert (call.name, call.namespace) == ("weather", "mcp__sea__")
    assert call.arguments == '{"city": "Rome"}'
    for event in streamed(client, **given):
        if event.type.startswith("response.output_item."):
            assert (event.item.name, event.item.namespace) == ("weather", "mcp__sea__")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    user = {"role": "user", "content": "x"}
    turn = f"{shown}u:x;a:!mcp__sea__weatherRome;t:21=;|a:"
    for earlier in (
        {"input": [user, call.to_dict(), output]},
        {"input": [output], "previous_response_id": answer.id},
    ):
        second = create(client, **(given | says("a") | earlier))
        assert second.usage.input_tokens == len(turn)
    chosen = {"type": "function", "name": "mcp__sky__weather"}
    (call,) = create(client, **(given | {"extra_body": None}), tool_choice=chosen).output
    assert (call.name, call.namespace) == ("weather", "mcp__sky")

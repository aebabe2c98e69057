"""Requests of agents' programs to the Responses API: their fields, tools and items."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pagedserve.server.responses.tools import log_left_out
from tests.server.conftest import Served
from tests.server.test_responses import (
    CALL,
    TIME,
    WEATHER,
    client_of,
    create,
    rebuilt,
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


def test_all_reasoning_is_its_summary_where_one_is_requested(client: openai.OpenAI) -> None:
    """Some clients show nothing else."""
    given: dict[str, Any] = {"reasoning": {"summary": "auto"}} | says("<think>So.</think>Yes.")
    events = streamed(client, **given)
    assert rebuilt(events) == [("reasoning", "So."), ("message", "Yes.")]
    kinds = [event.type.removeprefix("response.") for event in events]
    start = kinds.index("reasoning_summary_part.added")
    end = kinds.index("reasoning_summary_part.done")
    deltas = ["reasoning_summary_text.delta"] * (end - start - 2)
    assert kinds[start : end + 1] == [
        "reasoning_summary_part.added",
        *deltas,
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    for answer in (create(client, **given), events[-1].response):
        thought, _ = answer.output
        assert ([part.text for part in thought.summary], thought.content) == (["So."], [])
        assert answer.reasoning.summary == "auto"
        assert answer.usage.output_tokens_details.reasoning_tokens == len("So.")
    again = create(client, previous_response_id=answer.id, input="y", **says("a"))
    assert again.usage.input_tokens == len("u:x;a<So.>:Yes.;u:y;|a:")


def test_tools_of_other_types_are_left_out(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pagedserve")
    log_left_out.cache_clear()
    others = [{"type": "local_shell"}, {"type": "image_generation", "output_format": "png"}]
    for _ in range(2):
        answer = create(client, tools=[*others, WEATHER], **says("a"))
        assert [tool.name for tool in answer.tools] == ["weather"]
        assert answer.usage.input_tokens == len("Tweather|u:x;|a:")
    (line,) = (message for message in caplog.messages if "left out" in message)
    assert line.startswith("tools of other types than function, custom and namespace")
    answer = create(client, tools=others, **says("a"))
    assert (answer.tools, answer.usage.input_tokens) == ([], len("u:x;|a:"))


def test_tools_are_returned_without_descriptions_that_they_lack(client: openai.OpenAI) -> None:
    """Clients in Rust require a string if there is one."""
    inner = {"type": "function", "name": "tide", "parameters": {"default": None}}
    tools: Any = [
        {"type": "function", "name": "now"},
        {"type": "custom", "name": "note", "format": {"type": "text"}},
        {"type": "namespace", "name": "sea", "description": "d", "tools": [inner]},
    ]
    returned = create(client, tools=tools, **says("a")).to_dict()["tools"]
    assert returned == [tools[0] | {"parameters": None, "strict": None}, *tools[1:]]


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


def test_items_with_tools(client: openai.OpenAI) -> None:
    """The Codex CLI has all tools in one for some models."""
    tools = [{"type": "namespace", "name": "sky", "description": "d", "tools": [WEATHER]}]
    item = {"type": "additional_tools", "role": "developer", "tools": [*tools, {"type": "mcp"}]}
    given = {"tools": [TIME], **says(CALL.replace("weather", "sky__weather"))}
    first = create(client, input=[item, {"role": "user", "content": "x"}], **given)
    (call,) = first.output
    assert (call.name, call.namespace) == ("weather", "sky")
    assert first.usage.input_tokens == len("Ttime,sky__weather|u:x;|a:")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    # What is sent again replaces what was sent before.
    second = create(client, input=[item, output], previous_response_id=first.id, **says("a"))
    prompt = "Tsky__weather|u:x;a:!sky__weatherRome;t:21=;|a:"
    assert second.usage.input_tokens == len(prompt)
    kept = client.responses.input_items.list(second.id, order="asc").data
    assert kept[0].type == "additional_tools"


def test_items_of_stored_responses_are_referred_to(server: Served, client: openai.OpenAI) -> None:
    """As the Vercel AI SDK does by default: ``type`` may be missing."""
    text = f"<think>\nSo.\n</think>\nI look.\n{CALL}"
    first = create(client, tools=[WEATHER], **says(text))
    thinking, message, call = first.output
    items: Any = [
        {"role": "user", "content": "x"},
        {"type": "item_reference", "id": thinking.id},
        {"id": message.id},
        {"type": None, "id": call.id},
        {"type": "function_call_output", "call_id": call.call_id, "output": "21"},
    ]
    prompt = "u:x;a<So.>:I look.!weatherRome;t:21=;"
    second = create(client, input=items, **says("Ok."))
    assert second.usage.input_tokens == len(f"{prompt}|a:")
    counted = client.responses.input_tokens.count(model="formula", input=items)
    assert counted.input_tokens == second.usage.input_tokens
    kept = client.responses.input_items.list(second.id, order="asc").data
    assert [item.id for item in kept[1:4]] == [thinking.id, message.id, call.id]

    client.responses.delete(first.id)  # the second response has these items too
    items += [{"id": second.output[0].id}, {"role": "user", "content": "y"}]
    third = create(client, input=items, store=False, **says("Ok."))
    assert third.usage.input_tokens == len(f"{prompt}a:Ok.;u:y;|a:")
    with client_of(server, "other") as other, pytest.raises(openai.NotFoundError) as unknown:
        create(other, input=items)
    assert f"no item '{thinking.id}' is stored" in str(unknown.value)
    assert unknown.value.param == "input"
    twice: Any = [{"id": call.id}, {"type": "item_reference", "id": call.id}]
    with pytest.raises(openai.BadRequestError, match=r"refers to item '.*' 2 times; once"):
        create(client, input=twice)
    later = create(client, input=[*items, {"role": "user", "content": "z"}], **says("Ok."))
    client.responses.delete(later.id)  # the second has them still
    assert create(client, input=items, store=False, **says("Ok.")).output_text == "Ok."
    client.responses.delete(second.id)
    for dropped in (call.id, third.output[0].id):
        with pytest.raises(openai.NotFoundError, match=f"no item '{dropped}' is stored"):
            create(client, input=[{"type": "item_reference", "id": dropped}])


def test_reasoning_comes_back_in_what_a_client_cannot_read(client: openai.OpenAI) -> None:
    """Spring AI, langchain4j and the Codex CLI send nothing else of it."""
    given: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
    given |= says("<think>So.</think>Yes.")
    (done, *_) = (
        event.item
        for event in streamed(client, **given)
        if event.type == "response.output_item.done"
    )
    thought, message = create(client, **given).output
    assert thought.encrypted_content == done.encrypted_content
    for kept, size in (
        (thought.encrypted_content, len("u:x;a<So.>:Yes.;u:y;|a:")),
        ("gAAAAABo", len("u:x;a:Yes.;u:y;|a:")),  # another server's
        ("base64:/w==", len("u:x;a:Yes.;u:y;|a:")),
    ):
        items: list[Any] = [
            {"role": "user", "content": "x"},
            {"type": "reasoning", "id": thought.id, "summary": [], "encrypted_content": kept},
            message.to_dict(),
            {"role": "user", "content": "y"},
        ]
        answer = create(client, input=items, **says("Ok."))
        assert answer.usage.input_tokens == size

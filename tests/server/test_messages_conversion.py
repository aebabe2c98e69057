"""Chats that requests of the Messages API become, written out by hand."""

from typing import Any

import pytest

from pagedserve.errors import RequestError
from pagedserve.server.messages.conversion import chat_of
from pagedserve.server.messages.protocol import MessagesBody

CALL: Any = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": [1, None]}}
SHOWN: Any = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": [1, None]}},
}
PNG: Any = {"type": "base64", "media_type": "image/png", "data": "aGk="}
PICTURE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}

DOCUMENT: Any = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "d"},
    "citations": {"enabled": False},
}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def chat(messages: list[Any], **more: Any) -> Any:
    return chat_of(MessagesBody.model_validate({"messages": messages, "max_tokens": 5} | more))


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": [text("b")]}],
            [{"role": "user", "content": [text("a"), text("b")]}],
        ),
        (
            [{"role": "user", "content": [text("a"), {"type": "image", "source": PNG}]}],
            [{"role": "user", "content": [text("a"), PICTURE]}],
        ),
        (
            [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "so", "signature": "x"},
                        {"type": "redacted_thinking", "data": "y"},
                        text("b"),
                        CALL,
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [text("c"), {"type": "image", "source": PNG}],
                        },
                        {
                            "type": "tool_result",
                            "tool_use_id": "other",
                            "content": "no",
                            "is_error": True,
                        },
                        text("d"),
                    ],
                },
            ],
            [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": "b",
                    "reasoning": "so",
                    "tool_calls": [SHOWN],
                },
                {
                    "role": "tool",
                    "tool_call_id": "toolu_1",
                    "name": "look",
                    "content": [text("c"), PICTURE],
                },
                {"role": "tool", "tool_call_id": "other", "content": "Error: no"},
                {"role": "user", "content": "d"},
            ],
        ),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [CALL]},
                {
                    "role": "user",
                    "content": [
                        text("first"),
                        {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True},
                    ],
                },
            ],
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [SHOWN]},
                {"role": "user", "content": "first"},
                {
                    "role": "tool",
                    "tool_call_id": "toolu_1",
                    "name": "look",
                    "content": "Error: ",
                },
            ],
        ),
        ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
        (
            [{"role": "user", "content": [DOCUMENT | {"title": "t", "context": "c"}, text("a")]}],
            [{"role": "user", "content": [text("t\n\nc\n\nd"), text("a")]}],
        ),
    ],
)
def test_messages(messages: list[Any], wanted: list[Any]) -> None:
    assert chat(messages).messages == wanted
    system = {"role": "system", "content": "s"}
    assert chat(messages, system="s").messages == [system, *wanted]
    assert chat(messages, system=[text("s")]).messages == [system, *wanted]


def test_the_billing_header_of_claude_code_is_left_out() -> None:
    """Its hash differs in each request, and the prompt must not."""
    header = "x-anthropic-billing-header: cc_version=2; cc_entrypoint=cli; cch=eb6c6;"
    said = [{"role": "user", "content": "a"}]
    for system in ([text(header), text("s")], f"{header}\n\ns"):
        assert chat(said, system=system).messages == chat(said, system="s").messages
    assert chat(said, system=header).messages == said
    assert chat(said, system=f"s {header}").messages[0]["content"] == f"s {header}"


@pytest.mark.parametrize("name", ["", "f" * 300])
def test_any_name_of_a_call_is_accepted(name: str) -> None:
    """The model made it up, so no bound of the names of tools holds for it."""
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    messages = [
        {"role": "assistant", "content": [CALL | {"name": name}]},
        {"role": "user", "content": [result]},
    ]
    called, returned = chat(messages).messages
    assert called["tool_calls"][0]["function"]["name"] == returned["name"] == name


@pytest.mark.parametrize(
    "following",
    [
        [],
        [{"role": "user", "content": "b"}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "other"}]}],
        [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ],
)
def test_a_call_without_a_result_is_refused(following: list[Any]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [CALL]}]
    with pytest.raises(RequestError, match="that follows: toolu_1") as refused:
        chat([*messages, *following])
    assert refused.value.param == "messages"


def thought(said: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": said, "signature": "x"}


@pytest.mark.parametrize(
    ("keep", "reasoning"),
    [
        ({}, ["a", "b", "c", "d"]),
        ({"keep": "all"}, ["a", "b", "c", "d"]),
        ({"keep": {"type": "all"}}, ["a", "b", "c", "d"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [None, "b", "c", "d"]),
        ({"keep": {"type": "thinking_turns", "value": 1}}, [None, None, None, "d"]),
    ],
)
def test_earlier_reasoning_is_cleared(keep: dict[str, Any], reasoning: list[str | None]) -> None:
    """The results of tools, with or without text beside them, continue a turn."""
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    said: list[Any] = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": [thought("a"), text("x")]},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": [thought("b"), CALL]},
        {"role": "user", "content": [result, text("reminder")]},
        {"role": "assistant", "content": [thought("c"), text("y")]},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": [text("z")]},
        {"role": "user", "content": "4"},
        {"role": "assistant", "content": [thought("d"), text("w")]},
    ]
    edit = {"type": "clear_thinking_20251015"} | keep
    given = chat(said, context_management={"edits": [edit]}).messages
    answers = [each.get("reasoning") for each in given if each["role"] == "assistant"]
    assert answers == [*reasoning[:3], None, reasoning[3]]
    assert [each | {"reasoning": 0} for each in given] == [
        each | {"reasoning": 0} for each in chat(said).messages
    ]


def test_deferred_tools_are_left_out_until_a_result_refers_to_them() -> None:
    schema = {"type": "object"}
    tools = [
        {"name": name, "input_schema": schema, "defer_loading": name != "look"}
        for name in ("look", "read", "write")
    ]
    said: list[Any] = [{"role": "user", "content": "a"}]
    assert [tool.function.name for tool in chat(said, tools=tools).tools] == ["look"]
    reference = {"type": "tool_reference", "tool_name": "write"}
    found = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [reference]}
    said += [{"role": "assistant", "content": [CALL]}, {"role": "user", "content": [found]}]
    made = chat(said, tools=tools)
    assert [tool.function.name for tool in made.tools] == ["look", "write"]
    assert made.messages[-1]["content"] == "write"
    assert chat(said, tools=tools[1:2]).tools is None


def test_other_fields() -> None:
    said: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = chat(
        said,
        stop_sequences=["x"],
        top_k=3,
        tools=[
            {
                "name": "look",
                "description": "d",
                "input_schema": {"type": "object"},
                "input_examples": [{"at": "Zürich"}],
            }
        ],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        output_config={"effort": "high"},
        timeout=3,
    )
    assert (made.max_tokens, made.stop, made.top_k, made.timeout) == (5, ["x"], 3, 3)
    assert (made.tool_choice, made.parallel_tool_calls) == ("required", False)
    assert made.continue_final_message
    assert not made.add_generation_prompt
    assert (made.include_reasoning, made.reasoning_effort) == (False, "high")
    assert made.chat_template_kwargs == {"enable_thinking": False}
    assert made.thinking_token_budget is None
    thinks = chat(said, thinking={"type": "enabled", "budget_tokens": 2048})
    assert (thinks.thinking_token_budget, thinks.include_reasoning) == (2048, True)
    assert thinks.chat_template_kwargs == {"enable_thinking": True}
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for named in ({"output_config": {"format": form}}, {"output_format": form}):
        assert chat(said, **named).response_format.json_schema.schema_ == {"type": "object"}
    (tool,) = made.tools
    description = 'd\nExample of its input: {"at": "Zürich"}'
    function = {"name": "look", "description": description, "parameters": {"type": "object"}}
    assert tool.model_dump(exclude_none=True) == {"type": "function", "function": function}

"""Requests of the Messages API, converted to chats."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any, Final

from pagedserve.errors import RequestError
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.fields import JsonSchema, ResponseFormat
from pagedserve.server.messages.protocol import (
    Block,
    CountTokensBody,
    DocumentBlock,
    ImageBlock,
    MessagesBody,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolParam,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from pagedserve.server.tools.fields import Function, FunctionTool, NamedFunction, ToolName

# Start of the result of a tool that failed: templates have no field for it.
_ERROR: Final = "Error:"
# First line of Claude Code's system prompt; its hash differs in each request.
_BILLING: Final = re.compile(r"x-anthropic-billing-header.*\n*")
# What errors name instead of fields and values of a chat.
NAMES: Final = {
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "'required'": "'any'",
}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountTokensBody) -> ChatBody:
    """Convert a request to the chat that it describes.

    Raises:
        RequestError: A block is in a message of the wrong role, or a call has no result.
    """
    continues = body.messages[-1].role == "assistant"
    chat = ChatBody(
        model=body.model,
        priority=body.priority,
        request_id=body.request_id,
        timeout=body.timeout,
        messages=[*_messages_of(body)],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        **_tools_of(body),
        **_output_of(body),
        **(_sampling_of(body) if isinstance(body, MessagesBody) else {}),
    )
    chat.arrived_with(body.num_bytes)
    return chat


def _sampling_of(body: MessagesBody) -> dict[str, Any]:
    return {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
    }


def _output_of(body: CountTokensBody) -> dict[str, Any]:
    """Fields of reasoning, and of the format of the text."""
    fields: dict[str, Any] = {"reasoning_effort": body.output_config.effort}
    if (given := body.output_config.format or body.output_format) is not None:
        schema = JsonSchema(schema=given.schema_)
        fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    if (thinking := body.thinking) is not None:
        is_on = thinking.type != "disabled"
        fields["include_reasoning"] = is_on and thinking.display != "omitted"
        fields["thinking_token_budget"] = thinking.budget_tokens
        if thinking.type != "adaptive":
            fields["chat_template_kwargs"] = {"enable_thinking": is_on}
    return fields


def _tools_of(body: CountTokensBody) -> dict[str, Any]:
    """Fields of the tools, without deferred ones that no result refers to, and of their choice."""
    loaded = {
        part.tool_name
        for message in body.messages
        for block in message.content
        if isinstance(block, ToolResultBlock)
        for part in block.content
        if isinstance(part, ToolReferenceBlock)
    }
    fields: dict[str, Any] = {
        "tools": [
            FunctionTool(
                function=Function(
                    name=tool.name,
                    description=_description(tool),
                    parameters=tool.input_schema,
                    strict=tool.strict,
                )
            )
            for tool in body.tools
            if not tool.defer_loading or tool.name in loaded
        ]
        or None
    }
    choice = body.tool_choice
    if choice is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        fields["tool_choice"] = (
            _CHOICES[choice.type]
            if isinstance(choice, ToolChoice)
            else NamedFunction(function=ToolName(name=choice.name))
        )
    return fields


def _description(tool: ToolParam) -> str | None:
    """Description of a tool, with the examples of its input: templates have no field for these."""
    examples = [json.dumps(given, ensure_ascii=False) for given in tool.input_examples]
    lines = (tool.description, *(f"Example of its input: {example}" for example in examples))
    return "\n".join(filter(None, lines)) or None


def _messages_of(body: CountTokensBody) -> Iterator[dict[str, Any]]:
    """Messages of the chat; consecutive ones of a role are one turn, as in the Messages API."""
    if system := _without_billing(body.system):
        yield {"role": "system", "content": _content_of(system)}
    names = {
        block.id: block.name
        for message in body.messages
        for block in message.content
        if isinstance(block, ToolUseBlock)
    }
    turns = [
        (role, [block for message in turn for block in message.content])
        for role, turn in groupby(body.messages, lambda message: message.role)
    ]
    if (num_turns := body.context_management.num_thinking_turns) is not None:
        turns = _without_old_thinking(turns, num_turns)
    for (role, blocks), (_, following) in zip_longest(turns, turns[1:], fillvalue=("", [])):
        if role == "assistant":
            _check_results(blocks, following)
            yield _assistant_message(blocks)
        elif role == "user":
            yield from _user_messages(blocks, names)
        else:
            yield {"role": role, "content": _content_of(blocks)}


def _without_billing(blocks: Sequence[TextBlock]) -> list[TextBlock]:
    """Leave out the billing header, which would keep the prefix cache from what follows it."""
    kept: list[TextBlock] = []
    for block in blocks:
        header = _BILLING.match(block.text)
        if header is None:
            kept.append(block)
        elif rest := block.text[header.end() :]:
            kept.append(TextBlock(type="text", text=rest))
    return kept


def _without_old_thinking(
    messages: Sequence[tuple[str, list[Block]]], num_turns: int
) -> list[tuple[str, list[Block]]]:
    """Leave out the reasoning before the last turns that have some.

    A turn of the assistant continues after the results of its calls.
    """
    kept: list[tuple[str, list[Block]]] = []
    has_thinking = False
    for role, blocks in reversed(messages):
        rest = blocks
        if role == "assistant":
            rest = [block for block in blocks if not isinstance(block, ThinkingBlock)]
            has_thinking |= len(rest) < len(blocks)
        elif role == "user" and not any(isinstance(block, ToolResultBlock) for block in blocks):
            num_turns -= has_thinking
            has_thinking = False
        kept.append((role, blocks if num_turns > 0 else rest))
    return kept[::-1]


def _check_results(blocks: Sequence[Block], following: Sequence[Block]) -> None:
    """Refuse calls of a turn that have no result in the turn that follows.

    Raises:
        RequestError: Names the ids of these calls.
    """
    with_result = {block.tool_use_id for block in following if isinstance(block, ToolResultBlock)}
    calls = [block.id for block in blocks if isinstance(block, ToolUseBlock)]
    if without := [call_id for call_id in calls if call_id not in with_result]:
        raise RequestError(
            "messages has a tool_use without a tool_result in the message that follows: "
            f"{', '.join(without):.300}",
            param="messages",
        )


def _user_messages(blocks: Sequence[Block], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Messages of a user's turn: one of each result of a tool, and of the blocks between them."""
    between: list[Block] = []
    for block in blocks:
        if not isinstance(block, ToolResultBlock):
            between.append(block)
            continue
        if between:
            yield {"role": "user", "content": _content_of(between)}
            between = []
        yield _tool_message(block, names)
    if between or not blocks:
        yield {"role": "user", "content": _content_of(between)}


def _tool_message(block: ToolResultBlock, names: Mapping[str, str]) -> dict[str, Any]:
    content = _content_of(block.content)
    if block.is_error and isinstance(content, str):
        content = f"{_ERROR} {content}"
    elif block.is_error:
        content = [{"type": "text", "text": _ERROR}, *content]
    message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if (name := names.get(block.tool_use_id)) is not None:  # some templates show it
        message["name"] = name
    return message


def _assistant_message(blocks: Sequence[Block]) -> dict[str, Any]:
    rest: list[Block] = []
    calls: list[dict[str, Any]] = []
    thinking = ""
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ThinkingBlock):
            thinking += block.thinking
        elif not isinstance(block, RedactedThinkingBlock):
            rest.append(block)
    is_empty = not rest and bool(calls or thinking)
    message = {"role": "assistant", "content": None if is_empty else _content_of(rest)}
    if thinking:
        message["reasoning"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _content_of(blocks: Sequence[Block | ToolReferenceBlock]) -> str | list[dict[str, Any]]:
    """Content of a chat's message: a string for a single block of text, else its parts."""
    parts = [*map(_part_of, blocks)]
    if all("text" in part for part in parts) and len(parts) <= 1:
        return "".join(part["text"] for part in parts)
    return parts


def _part_of(block: Block | ToolReferenceBlock) -> dict[str, Any]:
    if isinstance(block, (TextBlock, DocumentBlock)):
        return {"type": "text", "text": block.text}
    if isinstance(block, ToolReferenceBlock):
        return {"type": "text", "text": block.tool_name}
    if isinstance(block, ImageBlock):
        return {"type": "image_url", "image_url": {"url": block.source.url}}
    raise RequestError(
        f"messages has a block of type {block.type!r} where its role has none: thinking and "
        "tool_use are the assistant's, tool_result the user's",
        param="messages",
    )

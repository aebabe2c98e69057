"""A request of the Responses API as a chat."""

from collections.abc import Sequence
from typing import Any, Final

import pagedserve.server.tools.fields as tool_fields
from pagedserve.errors import RequestError
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.chat.truncation import messages_within
from pagedserve.server.fields import ResponseFormat
from pagedserve.server.params import FIELD_NAMES
from pagedserve.server.protocol import SamplingBody
from pagedserve.server.responses.items import Item, messages_of
from pagedserve.server.responses.protocol import (
    NamedTool,
    ResponseAllowedTools,
    ResponsesBody,
    SchemaFormat,
)
from pagedserve.server.responses.tools import (
    CallableTool,
    OtherTool,
    ResponseCustomTool,
    ResponseGrammarFormat,
    Tool,
    shown_tools,
)

# Fields of a chat, and of this protocol, in messages of errors.
NAMES: Final = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    **FIELD_NAMES,
}


def chat_of(
    body: ResponsesBody,
    items: Sequence[Item],
    given_tools: Sequence[Tool],
    *,
    num_bytes: int,
    max_num_chars: int,
) -> ChatBody:
    """Convert a request to a chat.

    Args:
        body: The request.
        items: The whole conversation, oldest first.
        given_tools: Tools of the request and of items.
        num_bytes: Bytes of its JSON.
        max_num_chars: Maximum characters of the conversation.

    Raises:
        RequestError: Items that do not fit together, or too many characters.
    """
    tools, choice = _tools_of(given_tools, body.tool_choice)
    given: dict[str, Any] = {name: getattr(body, name) for name in SamplingBody.model_fields}
    given |= {
        "messages": _messages_of(body, items, tools, max_num_chars),
        "tools": tools or None,
        "tool_choice": choice if tools or choice != "auto" else None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format_of(body),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "verbosity": body.text.verbosity,
        "logprobs": body.has_logprobs,
        "top_logprobs": body.top_logprobs,
        "seed": body.seed,
        "cache_salt": body.cache_salt,
        "chat_template_kwargs": body.chat_template_kwargs,
        "structured_outputs": body.structured_outputs,
        "vllm_xargs": body.vllm_xargs,
    }
    chat = ChatBody.model_validate(given)
    chat.arrived_with(num_bytes)
    return chat


def _messages_of(
    body: ResponsesBody,
    items: Sequence[Item],
    tools: Sequence[tool_fields.Tool],
    max_num_chars: int,
) -> list[dict[str, Any]]:
    """Messages of a conversation; truncation drops the oldest turns beyond its characters."""
    rest = {
        "tools": [tool.for_template() for tool in tools],
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    messages = messages_of(body.instructions, items)
    return messages_within(messages, rest, max_num_chars, drops_turns=body.truncation == "auto")


def _tools_of(given: Sequence[Tool], choice: object) -> tuple[list[tool_fields.Tool], object]:
    """Tools of the chat and its ``tool_choice``.

    Raises:
        RequestError: Allowed tools that the request does not have, or a required call where all
            tools are left out.
    """
    tools, chosen = shown_tools(given), choice
    left_out = [tool.type for tool in given if isinstance(tool, OtherTool)]
    if choice == "required" and left_out and not tools:
        raise RequestError(
            f"tool_choice is 'required', and tools has only {left_out[0]!r:.80}, which this server "
            "does not run; accepted are function, custom and namespace",
            param="tool_choice",
        )
    if isinstance(choice, ResponseAllowedTools):
        allowed = {tool.name for tool in choice.tools}
        if unknown := sorted(allowed - {tool.name for tool in tools}):
            raise RequestError(
                f"tool_choice allows {unknown[0]!r:.80}, which tools does not have",
                param="tool_choice",
            )
        tools, chosen = [tool for tool in tools if tool.name in allowed], choice.mode
    if isinstance(choice, NamedTool):
        chosen = tool_fields.NamedFunction(function=tool_fields.ToolName(name=choice.name))
    return [_chat_tool(tool) for tool in tools], chosen


def _chat_tool(tool: CallableTool) -> tool_fields.Tool:
    fields = tool.model_dump(exclude={"type", "format"}, exclude_none=True)
    if not isinstance(tool, ResponseCustomTool):
        return tool_fields.FunctionTool(function=tool_fields.Function(**fields))
    if isinstance(tool.format, ResponseGrammarFormat):
        grammar = tool.format.model_dump(exclude={"type"})
        fields["format"] = {"type": "grammar", "grammar": grammar}
    return tool_fields.CustomTool(type="custom", custom=tool_fields.Custom(**fields))


def _format_of(body: ResponsesBody) -> ResponseFormat:
    given = body.text.format
    if isinstance(given, SchemaFormat):
        return ResponseFormat(type=given.type, json_schema=given)
    return ResponseFormat(type=given.type)

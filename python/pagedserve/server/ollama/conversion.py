"""Requests of Ollama's API, converted to chats and completions."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

from pagedserve.errors import RequestError
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.chat.truncation import messages_within
from pagedserve.server.completions.protocol import CompletionBody
from pagedserve.server.fields import JsonSchema, ResponseFormat
from pagedserve.server.ollama.protocol import (
    GenerateBody,
    OllamaBody,
    OllamaChatBody,
    OllamaMessageParam,
    Options,
)

# What errors name instead of fields of a chat.
NAMES: Final = {
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}
# In the place of a smaller `top_p`, which Ollama accepts: it keeps the most likely token alone.
_MIN_TOP_P: Final = 1e-6
# Templates of some families require ids of nine letters and digits.
_CALL_ID: Final = "call{:05}"


class _Call(NamedTuple):
    """A call without a result.

    Attributes:
        name: Name of the tool.
        given_id: Id of the call in the request.
        call_id: Id of the call in the chat.
    """

    name: str
    given_id: str | None
    call_id: str


def chat_of(body: OllamaChatBody, *, max_num_chars: int) -> ChatBody:
    """Convert a request to the chat that it describes.

    Args:
        body: The request.
        max_num_chars: Maximum characters of the chat, which may be truncated to them.

    Raises:
        RequestError: It has more.
    """
    rest = {"tools": [tool.for_template() for tool in body.tools]}
    messages = [*_messages_of(body.messages)]
    messages = messages_within(messages, rest, max_num_chars, drops_turns=body.truncate)
    return _chat(body, messages, tools=body.tools or None)


def chat_of_prompt(body: GenerateBody) -> ChatBody:
    """Convert a prompt to a chat of one message, or two with a system message."""
    system = [OllamaMessageParam(role="system", content=body.system)] if body.system else []
    user = OllamaMessageParam(role="user", content=body.prompt, images=body.images)
    return _chat(body, [*_messages_of([*system, user])])


def completion_of(body: GenerateBody, *, max_model_len: int) -> CompletionBody:
    """Convert a raw prompt to a completion.

    Args:
        body: The request.
        max_model_len: Maximum tokens, where the request has no maximum.

    Raises:
        RequestError: A raw prompt with fields that are for chats.
    """
    for name in ("system", "images", "think"):
        if getattr(body, name):
            raise RequestError(f"{name} is given with raw, whose prompt is the whole text")
    fields = _common(body)
    if fields["max_tokens"] is None:
        fields["max_tokens"] = max_model_len
    fields["logprobs"] = body.top_logprobs if body.logprobs else None
    completion = CompletionBody(prompt=body.prompt, **fields)
    completion.arrived_with(body.num_bytes)
    return completion


def _chat(body: OllamaBody, messages: list[dict[str, Any]], **more: Any) -> ChatBody:
    last = messages[-1] if messages else {}
    continues = last.get("role") == "assistant" and "tool_calls" not in last
    chat = ChatBody(
        messages=messages,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs or None,
        **_common(body),
        **_thinking(body),
        **more,
    )
    chat.arrived_with(body.num_bytes)
    return chat


def _common(body: OllamaBody) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": body.model,
        "priority": body.priority,
        "request_id": body.request_id,
        "timeout": body.timeout,
        "stream": body.stream,
        **_sampling_of(body.options),
    }
    if body.format == "json":
        fields["response_format"] = ResponseFormat(type="json_object")
    elif body.format:
        schema = JsonSchema(schema=body.format)
        fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    return fields


def _sampling_of(options: Options) -> dict[str, Any]:
    num_predict, top_p, stop = options.num_predict, options.top_p, options.stop or []
    return {
        "temperature": options.temperature,
        "top_p": None if top_p is None else min(max(top_p, _MIN_TOP_P), 1),
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": [*filter(None, [stop] if isinstance(stop, str) else stop)] or None,
        "max_tokens": None if num_predict in (-1, -2) else num_predict,
        "repetition_penalty": None if options.repeat_last_n == 0 else options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }


def _thinking(body: OllamaBody) -> dict[str, Any]:
    """Fields of reasoning; templates know two switches."""
    if body.think is None:
        return {}
    if isinstance(body.think, str):
        return {"reasoning_effort": body.think}
    return {
        "include_reasoning": body.think,
        "chat_template_kwargs": {"enable_thinking": body.think},
    }


def _messages_of(messages: Sequence[OllamaMessageParam]) -> Iterator[dict[str, Any]]:
    """Messages of the chat; calls get ids, and the results of tools those of the calls before."""
    waiting: list[_Call] = []
    num_calls = 0
    for turn in _turns(messages):
        found: dict[str, Any] = {"role": turn[0].role, "content": _content_of(turn)}
        if thinking := _joined(message.thinking for message in turn):
            found["reasoning"] = thinking
        if called := [call for message in turn for call in message.tool_calls]:
            calls = []
            for call in called:
                call_id = _CALL_ID.format(num_calls)
                num_calls += 1
                waiting.append(_Call(call.function.name, call.id, call_id))
                calls.append(
                    {"id": call_id, "type": "function", "function": call.function.model_dump()}
                )
            found["tool_calls"] = calls
        if found["role"] == "tool":
            found |= _result_of(turn[0], waiting)
        yield found


def _turns(messages: Sequence[OllamaMessageParam]) -> Iterator[list[OllamaMessageParam]]:
    """Group consecutive messages of a role, as Ollama does: some templates refuse them.

    Each result of a tool is a turn.  A message of the role ``thinking`` is the assistant's.
    """
    spoken = [
        message.model_copy(update={"role": "assistant", "content": "", "thinking": message.content})
        if message.role == "thinking"
        else message
        for message in messages
    ]
    for role, turn in groupby(spoken, attrgetter("role")):
        parts = [*turn]
        yield from ([part] for part in parts) if role == "tool" else [parts]


def _joined(texts: Iterable[str | None]) -> str:
    return "\n\n".join(filter(None, texts))


def _result_of(message: OllamaMessageParam, waiting: list[_Call]) -> dict[str, str]:
    """Name and id of the call that a message answers: by id, else by name, else the first."""
    by_id = [call for call in waiting if call.given_id and call.given_id == message.tool_call_id]
    by_name = [call for call in waiting if call.name == message.tool_name]
    answered = next(iter([*by_id, *by_name, *waiting]), None)
    name, call_id = message.tool_name, message.tool_call_id
    if answered is not None:
        waiting.remove(answered)
        name, call_id = name or answered.name, answered.call_id
    found = {"name": name, "tool_call_id": call_id}
    return {key: value for key, value in found.items() if value}


def _content_of(turn: Sequence[OllamaMessageParam]) -> str | list[dict[str, Any]]:
    if not any(message.images for message in turn):
        return _joined(message.content for message in turn)
    parts: list[dict[str, Any]] = []
    for message in turn:
        urls = [f"data:;base64,{image}" for image in message.images]
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        if message.content:
            parts.append({"type": "text", "text": message.content})
    return parts

"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagedserve.outputs import CompletionOutput
from pagedserve.server.chat.answer_reader import AnswerReader
from pagedserve.server.chat.job import prepare_chat, renamed_fields
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.context import Context
from pagedserve.server.http.apis import typed_event
from pagedserve.server.http.errors import ServerError
from pagedserve.server.job import TokenJob
from pagedserve.server.messages.blocks import BlockReader, ContentBlock
from pagedserve.server.messages.conversion import NAMES, chat_of
from pagedserve.server.messages.events import BlockEvents
from pagedserve.server.messages.protocol import CountTokensBody, MessagesBody
from pagedserve.server.tools.fields import NamedTool


async def message_job(context: Context, body: MessagesBody, answer_id: str) -> "MessageJob":
    """Validate a request for a message, and create its job.

    Raises:
        RequestError: Fields are invalid.
        ServerError: Unknown model, or the model is still loading.
    """
    chat_body = await _chat_body(context, body)
    with renamed_fields(NAMES):
        chat = await prepare_chat(context, chat_body)
    return MessageJob(
        context=context,
        body=chat_body,
        params=chat.params,
        prompt_sizes=chat.prompt_sizes,
        make_prompts=chat.prompts,
        answer_id=answer_id,
        model=chat.model,
        lora_request=chat.lora_request,
        reader=chat.reader,
    )


async def num_tokens(context: Context, body: CountTokensBody) -> int:
    """Count the tokens of a prompt.

    Raises:
        RequestError: Fields are invalid, or the template does not accept the messages.
        ServerError: Unknown model, still loading, or messages with images.
    """
    chat_body = await _chat_body(context, body)
    context.model_name(body.model)
    return len(await context.text.chat_token_ids(chat_body))


async def _chat_body(context: Context, body: CountTokensBody) -> ChatBody:
    await context.check_ready()
    body.check_fields(allows_unknown=context.args.allow_unknown_fields)
    return await context.for_body(partial(chat_of, body), num_bytes=body.num_bytes)


@dataclass(slots=True, kw_only=True)
class MessageJob(TokenJob):
    """A request for a message.

    Attributes:
        reader: Parser of its text.
    """

    body: ChatBody
    reader: AnswerReader

    @property
    def streams(self) -> bool:
        """Whether its response is a stream."""
        return self.body.stream

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompts."""
        return "messages"

    async def answer(self) -> AsyncGenerator[bytes, None]:
        """Chunks of its response, one unless it streams."""
        async with aclosing(self._stream() if self.body.stream else self._whole()) as chunks:
            with renamed_fields(NAMES):
                async for chunk in chunks:
                    yield chunk

    async def _whole(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.outputs()) as outputs:
            (completion,) = [each async for _, output in outputs for each in output.outputs]
        make = partial(self._text, completion)
        yield await self.context.for_body(make, num_bytes=len(completion.text))

    def _text(self, completion: CompletionOutput) -> bytes:
        """The whole response."""
        found: dict[int, tuple[ContentBlock, list[str]]] = {}
        for block, text in BlockReader().read(self._delta(completion)):
            found.setdefault(block.index, (block, []))[1].append(text)
        content = ", ".join(block.whole("".join(texts)) for block, texts in found.values())
        message = json.dumps(self._message([], self._end(completion)))
        # Strings have no such text: their quotes are escaped.
        return message.replace('"content": []', f'"content": [{content}]', 1).encode()

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """Events of a stream: all that are pending in one chunk."""
        blocks, is_begun = BlockEvents(), False
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                events = []
                if not is_begun:
                    is_begun = True
                    start = self._message([], {"stop_reason": None, "stop_sequence": None})
                    events.append(typed_event("message_start", message=start))
                for completion in output.outputs:
                    events += blocks.of_delta(self._delta(completion))
                    if completion.finish_reason is not None:
                        end = self._end(completion)
                        events += blocks.of_end()
                        events.append(typed_event("message_delta", delta=end, usage=self._usage()))
                        events.append(typed_event("message_stop"))
                if events:
                    yield "".join(events).encode()

    def _delta(self, completion: CompletionOutput) -> dict[str, Any]:
        is_last = completion.finish_reason is not None
        return self.reader.fields(0, completion.text, is_last=is_last, is_delta=True)

    def _message(self, content: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **end,
            "usage": self._usage(),
        }

    def _end(self, completion: CompletionOutput) -> dict[str, str | None]:
        """Why the message ended.

        Raises:
            ServerError: 503, it was aborted: the protocol has no word for a part of a message.
        """
        reason = self.reader.finish_reason(0, completion.finish_reason)
        stop_sequence = None
        if reason == "abort":
            raise ServerError(503, "the request was aborted before the message was complete")
        if reason == "length":
            is_full = self.usage.completion_tokens >= (self.params.max_tokens or 0)
            stop_reason = "max_tokens" if is_full else "model_context_window_exceeded"
        elif isinstance(completion.stop_reason, str):
            stop_reason, stop_sequence = "stop_sequence", completion.stop_reason
        elif reason == "tool_calls" or isinstance(self.body.tool_choice, NamedTool):
            stop_reason = "tool_use"
        else:
            stop_reason = "end_turn"
        return {"stop_reason": stop_reason, "stop_sequence": stop_sequence}

    def _usage(self) -> dict[str, int]:
        cached = sum(self.usage.cached_tokens.values())
        return {
            "input_tokens": sum(self.usage.prompt_tokens.values()) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage.completion_tokens,
        }

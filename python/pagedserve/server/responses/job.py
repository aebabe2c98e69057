"""Request handler of ``POST /v1/responses``: whole responses, and streams of events."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final

from starlette.types import Scope

from pagedserve.errors import RequestError
from pagedserve.inputs import Prompt, TokensPrompt
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.server.chat.job import PreparedChat, prepare_chat, renamed_fields
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.chat.truncation import truncated_prompt
from pagedserve.server.context import Context
from pagedserve.server.http.apis import typed_event
from pagedserve.server.http.errors import ServerError, scrubbed
from pagedserve.server.job import TokenJob
from pagedserve.server.logprobs import chat_logprobs
from pagedserve.server.responses.chat import NAMES, chat_of
from pagedserve.server.responses.items import ITEMS, Item, items_of, references_of, tools_of
from pagedserve.server.responses.output import Event, Output
from pagedserve.server.responses.protocol import OPAQUE_REASONING, ResponsesBody
from pagedserve.server.responses.store import Key, Stored
from pagedserve.server.responses.tools import Tool, name_of, names_of_calls, returned_tools
from pagedserve.server.tokenization import Tokenization, token_ids_of

# Status of a response, and the reason why it is incomplete, by the finish reason of its text.
_ENDS: Final = {
    "stop": ("completed", None),
    "length": ("incomplete", {"reason": "max_output_tokens"}),
    "abort": ("cancelled", None),
}


async def responses_job(context: Context, body: ResponsesBody, owner: bytes) -> "ResponsesJob":
    """Validate a request, and create its job.

    Args:
        context: Context of the server.
        body: The request.
        owner: Digest of its API key.

    Raises:
        RequestError: Fields are invalid, or the template does not accept the items.
        ServerError: Unknown model, previous response or item, or the model is still loading.
    """
    given, tools, chat_body = await _conversation(context, body, owner)
    with renamed_fields(NAMES):
        chat = await prepare_chat(context, chat_body)
    if body.has_logprobs and chat.reader.is_needed:
        raise RequestError(
            "include has message.output_text.logprobs with tools or on a server with "
            "--reasoning-parser, where tokens are not those of the message alone",
            param="include",
        )
    return ResponsesJob(
        context=context,
        body=body,
        params=chat.params,
        prompt_sizes=chat.prompt_sizes,
        make_prompts=partial(_prompts, body, chat),
        answer_id=f"resp_{uuid.uuid4().hex}",
        model=chat.model,
        lora_request=chat.lora_request,
        chat=chat,
        owner=owner,
        items=given,
        output=Output(
            names_of_calls(tools),
            summarizes=_requested_summary(body) is not None,
            has_opaque=OPAQUE_REASONING in body.include,
        ),
    )


async def num_input_tokens(context: Context, body: ResponsesBody, owner: bytes) -> int:
    """Count the tokens of the prompt of a request.

    Args:
        context: Context of the server.
        body: The request.
        owner: Digest of its API key.

    Raises:
        RequestError: Fields are invalid, the template does not accept the items, or images.
        ServerError: Unknown model, previous response or item, or the model is still loading.
    """
    *_, chat_body = await _conversation(context, body, owner)
    context.model_name(body.model)
    with renamed_fields(NAMES):
        return len(token_ids_of(await _prompt(context.text, body, chat_body)))


async def _conversation(
    context: Context, body: ResponsesBody, owner: bytes
) -> tuple[list[Item], list[Tool], ChatBody]:
    """Validate a request; return the items of its input, all tools, and the whole chat."""
    await context.check_ready()
    body.check_fields(allows_unknown=context.args.allow_unknown_fields)
    store = context.responses
    earlier: Sequence[Stored] = ()
    if body.previous_response_id is not None:
        earlier = store.conversation((owner, body.previous_response_id))
    referred = store.with_items(owner, references_of(body.input))
    known = {id(stored): stored for stored in (*earlier, *referred.values())}.values()
    num_bytes = body.num_bytes + sum(stored.num_bytes for stored in known)
    make_chat = partial(_chat, body, earlier, referred, num_bytes, context.text.max_num_chars)
    with renamed_fields(NAMES):
        return await context.for_body(make_chat, num_bytes=num_bytes)


def _chat(
    body: ResponsesBody,
    earlier: Sequence[Stored],
    referred: Mapping[str, Stored],
    num_bytes: int,
    max_num_chars: int,
) -> tuple[list[Item], list[Tool], ChatBody]:
    parsed = {id(stored): {item.id: item for item in stored.turn()} for stored in referred.values()}
    known = {item_id: parsed[id(stored)][item_id] for item_id, stored in referred.items()}
    given = items_of(body.input, known)
    items = [*(item for stored in earlier for item in stored.turn()), *given]
    own = {name_of(tool) for tool in body.tools}
    tools = [*body.tools, *(tool for tool in tools_of(items) if name_of(tool) not in own)]
    chat = chat_of(body, items, tools, num_bytes=num_bytes, max_num_chars=max_num_chars)
    return given, tools, chat


async def _prompts(body: ResponsesBody, chat: PreparedChat) -> list[Prompt]:
    return chat.rendered(await _prompt(chat.context.text, body, chat.body))


async def _prompt(text: Tokenization, body: ResponsesBody, chat: ChatBody) -> TokensPrompt:
    """Render the chat of a request, truncated if requested."""
    if body.truncation == "disabled":
        return await text.chat_prompt(chat)
    return await truncated_prompt(text, chat, body.max_output_tokens or 1)


@dataclass(slots=True, kw_only=True)
class ResponsesJob(TokenJob):
    """A response.

    Attributes:
        chat: The request as a chat.
        owner: Digest of its API key.
        items: Items of its input.
        output: Items of the response so far.
        status: Status of the response.
        incomplete: Why it is incomplete; None if it is not.
        error: Error that ended it.
        num_reasoning_tokens: Tokens of its reasoning, once it has ended.
        num_bytes: Approximate size of the log-probabilities of its output.
        pending: Events of its stream that are not sent yet.
    """

    body: ResponsesBody
    chat: PreparedChat
    owner: bytes
    items: Sequence[Item]
    output: Output
    status: str = "in_progress"
    incomplete: dict[str, str] | None = None
    error: dict[str, str] | None = None
    num_reasoning_tokens: int = 0
    num_bytes: int = 0
    pending: list[Event] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    @property
    def streams(self) -> bool:
        """Whether its response is a stream."""
        return self.body.stream

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompt."""
        return "input"

    @property
    def key(self) -> Key:
        """Its key in the store."""
        return self.owner, self.answer_id

    async def answer(self) -> AsyncGenerator[bytes, None]:
        """Chunks of its response, one unless it streams."""
        running = self.context.responses.running
        if self.body.store:
            running[self.key] = self.shown
        try:
            chunks = self._stream() if self.body.stream else self._whole()
            async with aclosing(chunks):
                with renamed_fields(NAMES):
                    async for chunk in chunks:
                        yield chunk
        finally:
            running.pop(self.key, None)

    def failure(self, error: ServerError, scope: Scope) -> bytes:
        """Event that ends a stream with an error."""
        del scope
        self.status = "failed"
        self.error = {"code": "server_error", "message": scrubbed(error.message)}
        ends = self.output.close("incomplete")
        response = self.shown()
        if self.body.store:
            self.context.responses.put(self.key, self._dumped(response))
        return self._written([*self.pending, *ends, ("response.failed", {"response": response})])

    def shown(self) -> dict[str, Any]:
        """The response as it is now."""
        body, params = self.body, self.params
        has_usage = self.status not in {"in_progress", "failed"}
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if self.status == "completed" else None,
            "status": self.status,
            "background": False,
            "error": self.error,
            "incomplete_details": self.incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata,
            "model": self.model,
            "output": self.output.shown(),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": _requested_summary(body),
            },
            "store": body.store,
            "temperature": params.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": _shown_choice(body.tool_choice),
            "tools": returned_tools(body.tools),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation,
            "usage": self._usage() if has_usage else None,
        }

    async def _whole(self) -> AsyncGenerator[bytes, None]:
        """The single chunk of a whole response."""
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                for completion in output.outputs:
                    await self._feed(output, completion)
        await self._end()
        yield await self._keep(self.shown())

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """Events of a stream: all that are pending in one chunk."""
        self.pending = [
            (f"response.{name}", {"response": self.shown()}) for name in ("created", "in_progress")
        ]
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                for completion in output.outputs:
                    self.pending += await self._feed(output, completion)
                if self.pending:
                    events, self.pending = self.pending, []
                    yield self._written(events)
        events = await self._end()
        kind = "completed" if self.status == "completed" else "incomplete"
        response = self.shown()
        await self._keep(response)
        yield self._written([*events, (f"response.{kind}", {"response": response})])

    async def _feed(self, output: RequestOutput, completion: CompletionOutput) -> list[Event]:
        """Add the next text of the response."""
        is_last = completion.finish_reason is not None
        fields = self.chat.reader.fields(0, completion.text, is_last=is_last, is_delta=True)
        if is_last:
            self.status, self.incomplete = _ENDS[str(completion.finish_reason)]
        logprobs: list[dict[str, Any]] = []
        if completion.logprobs is not None:
            num_bytes = self._num_bytes(output, completion, is_first=False)
            self.num_bytes += num_bytes
            num_top = self.body.top_logprobs or 0
            token_ids, entries = completion.token_ids, completion.logprobs
            make = partial(chat_logprobs, self.chat.names, num_top, token_ids, entries)
            logprobs = (await self.context.for_body(make, num_bytes=num_bytes))["content"]
        return self.output.feed(fields, logprobs)

    async def _end(self) -> list[Event]:
        """End the output."""
        events = self.output.end("completed" if self.status == "completed" else "incomplete")
        if reasoning := self.output.reasoning:
            text = self.context.text
            reasoning = reasoning[: text.max_num_chars]
            token_ids = await text.encode(reasoning, add_special_tokens=False)
            self.num_reasoning_tokens = len(token_ids)
        return events

    async def _keep(self, response: dict[str, Any]) -> bytes:
        """Store the finished response, if requested; return its JSON."""
        make = partial(self._dumped, response)
        stored = await self.context.for_body(make, num_bytes=self.num_bytes + self.body.num_bytes)
        if self.body.store:
            self.context.responses.put(self.key, stored)
        return stored.response

    def _dumped(self, response: dict[str, Any]) -> Stored:
        items = ITEMS.dump_python(list(self.items), exclude_none=True) if self.body.store else []
        return Stored(
            json.dumps(response).encode(),
            json.dumps(items).encode(),
            self.body.previous_response_id,
            tuple(item["id"] for item in (*items, *response["output"])),
        )

    def _written(self, events: Iterable[Event]) -> bytes:
        """Events of a stream as bytes, each with the next sequence number."""
        return "".join(
            typed_event(kind, sequence_number=next(self._numbers), **fields)
            for kind, fields in events
        ).encode()

    def _usage(self) -> dict[str, Any]:
        num_input, num_output = sum(self.usage.prompt_tokens.values()), self.usage.completion_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {
                "cached_tokens": sum(self.usage.cached_tokens.values()),
                "cache_write_tokens": 0,
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": num_input + num_output,
        }


def _requested_summary(body: ResponsesBody) -> str | None:
    return None if body.reasoning is None else body.reasoning.requested_summary


def _shown_choice(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump()

"""``POST /api/chat`` and ``POST /api/generate``."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from pagedserve.engine.stats import request_time
from pagedserve.errors import RequestError
from pagedserve.inputs import Prompt
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.server.chat.answer_reader import AnswerReader
from pagedserve.server.chat.job import PreparedChat, prepare_chat, renamed_fields
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.chat.truncation import truncated_prompt
from pagedserve.server.completions.job import completion_job
from pagedserve.server.context import Context
from pagedserve.server.http.errors import ServerError
from pagedserve.server.job import TokenJob
from pagedserve.server.logprobs import TokenNames, chat_logprobs
from pagedserve.server.ollama.conversion import (
    NAMES,
    chat_of,
    chat_of_prompt,
    completion_of,
)
from pagedserve.server.ollama.protocol import GenerateBody, OllamaBody, OllamaChatBody
from pagedserve.server.protocol import Body

_NANOSECONDS: Final = 10**9


async def chat_job(context: Context, body: OllamaChatBody, answer_id: str) -> "OllamaJob":
    """Validate a chat, and create its job.

    Raises:
        RequestError: Fields are invalid.
        ServerError: Unknown model, or the model is still loading.
    """
    await _check(context, body)
    make_chat = partial(chat_of, body, max_num_chars=context.text.max_num_chars)
    chat = await context.for_body(make_chat, num_bytes=body.num_bytes)
    return await _chat_job(context, body, chat, answer_id, prompt_field="messages")


async def generate_job(context: Context, body: GenerateBody, answer_id: str) -> "OllamaJob":
    """Validate a prompt, and create its job; it raises as ``chat_job`` does."""
    await _check(context, body)
    context.text.check_length(body.system + body.prompt, "prompt")
    if not body.raw:
        return await _chat_job(
            context, body, chat_of_prompt(body), answer_id, prompt_field="prompt"
        )
    completion = completion_of(body, max_model_len=context.text.max_model_len)
    with renamed_fields(NAMES):
        job = await completion_job(context, completion, answer_id)
    detokenizer = await context.text.detokenizer(skip_special_tokens=True)
    return OllamaJob(
        **job.same_request(),
        names=TokenNames(detokenizer, as_ids=False),
        asked_as="prompt",
        num_top=body.top_logprobs if body.logprobs else None,
    )


async def _check(context: Context, body: OllamaBody) -> None:
    """Check what no chat checks; set the model's name without a tag."""
    await context.check_ready()
    body.check_fields(allows_unknown=True)  # as by Ollama
    body.model = context.model_name(body.model)
    if body.think and context.args.reasoning_parser is None:
        raise RequestError(
            f"think is {body.think!r}, and the server separates no reasoning: leave it out, or "
            "start with --reasoning-parser",
            param="think",
        )


async def _chat_job(
    context: Context, body: OllamaBody, chat: ChatBody, answer_id: str, *, prompt_field: str
) -> "OllamaJob":
    with renamed_fields(NAMES | {"messages": prompt_field}):
        prepared = await prepare_chat(context, chat)
    return OllamaJob(
        context=context,
        body=chat,
        params=prepared.params,
        prompt_sizes=prepared.prompt_sizes,
        make_prompts=partial(_truncated, prepared) if body.truncate else prepared.prompts,
        answer_id=answer_id,
        model=prepared.model,
        lora_request=prepared.lora_request,
        names=prepared.names,
        reader=prepared.reader,
        asked_as=prompt_field,
        num_top=(chat.top_logprobs or 0) if chat.logprobs else None,
    )


async def _truncated(chat: PreparedChat) -> list[Prompt]:
    """Render a chat without the oldest turns that do not fit beside a token of the response."""
    return chat.rendered(await truncated_prompt(chat.context.text, chat.body, 1))


def stamp() -> str:
    """The time now, as responses have it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(slots=True, kw_only=True)
class OllamaJob(TokenJob):
    """A chat or a prompt of Ollama's API.

    Attributes:
        names: Format of tokens in log-probabilities.
        asked_as: Field of the request with the prompt: "messages" or "prompt".
        reader: Parser of its text; None for a raw prompt.
        num_top: Number of most likely tokens beside each; None without log-probabilities.
        calls: Id, name and arguments of each tool call so far.
    """

    body: Body
    names: TokenNames
    asked_as: str
    num_top: int | None
    reader: AnswerReader | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether its response is a stream."""
        return self.body.stream

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompts."""
        return "messages" if isinstance(self.body, ChatBody) else "prompt"

    async def answer(self) -> AsyncGenerator[bytes, None]:
        """Lines of its response, one unless it streams."""
        async with aclosing(self._lines()) as lines:
            with renamed_fields(NAMES | {"messages": self.asked_as}):
                async for line in lines:
                    yield line

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                lines = ""
                for completion in output.outputs:
                    fields, more = self._read(completion), self._logprobs(completion)
                    if self.body.stream and (fields or more):
                        lines += self._line(fields, more)
                        fields, more = {}, {}
                    if completion.finish_reason is None:
                        continue
                    calls = self._called()
                    if self.body.stream:
                        lines += "".join(self._line({"tool_calls": [call]}, {}) for call in calls)
                    elif calls:
                        fields["tool_calls"] = calls
                    lines += self._line(fields, more | self._end(output, completion))
                if lines:
                    yield lines.encode()

    def _read(self, completion: CompletionOutput) -> dict[str, Any]:
        """Text and reasoning of a completion; calls are kept until they are complete."""
        if self.reader is None:
            return {"content": completion.text} if completion.text else {}
        is_last = completion.finish_reason is not None
        found = self.reader.fields(0, completion.text, is_last=is_last, is_delta=True)
        for call in found.get("tool_calls", ()):
            function = call["function"]
            if call["index"] not in self.calls:
                self.calls[call["index"]] = [call["id"], function["name"], ""]
            self.calls[call["index"]][-1] += function["arguments"]
        fields = {"content": found.get("content"), "thinking": found.get("reasoning")}
        return {name: text for name, text in fields.items() if text}

    def _called(self) -> list[dict[str, Any]]:
        """Tool calls, without one whose arguments were cut off."""
        calls: list[dict[str, Any]] = []
        for call_id, name, arguments in self.calls.values():
            try:
                function = {"index": len(calls), "name": name, "arguments": json.loads(arguments)}
            except ValueError:
                continue
            calls.append({"id": call_id, "function": function})
        return calls

    def _line(self, fields: Mapping[str, Any], more: Mapping[str, Any]) -> str:
        """An object of the response; those of prompts have the fields of a message directly."""
        shown: dict[str, Any] = {"model": self.model, "created_at": stamp()}
        if self.asked_as == "messages":
            shown["message"] = {"role": "assistant", "content": "", **fields}
        else:
            content = fields.get("content", "")
            rest = {name: value for name, value in fields.items() if name != "content"}
            shown |= {"response": content, **rest}
        return json.dumps({**shown, "done": False, **more}) + "\n"

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any]:
        if self.num_top is None or completion.logprobs is None:
            return {}
        entries = completion.logprobs
        found = chat_logprobs(self.names, self.num_top, completion.token_ids, entries)
        return {"logprobs": found["content"]}

    def _end(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """Why the response ended, and its counts and durations in nanoseconds.

        Raises:
            ServerError: 503, it was aborted: the protocol has no word for it.
        """
        if completion.finish_reason == "abort":
            raise ServerError(503, "the request was aborted before the response was complete")
        metrics, now = output.metrics, request_time()
        begun = metrics.first_scheduled_time or now
        first = metrics.first_token_time or now
        return {
            "done": True,
            "done_reason": completion.finish_reason,
            "total_duration": nanoseconds(now - self.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": sum(self.usage.prompt_tokens.values()),
            "prompt_eval_duration": nanoseconds(first - begun),
            "eval_count": self.usage.completion_tokens,
            "eval_duration": nanoseconds((metrics.last_token_time or now) - first),
        }


def nanoseconds(seconds: float) -> int:
    """Nanoseconds of a duration, at least 1: clients divide by it."""
    return max(1, round(seconds * _NANOSECONDS))

"""``POST /v1/chat/completions``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from pagedserve.errors import RequestError
from pagedserve.inputs import Prompt, TokensPrompt
from pagedserve.inputs.chat import text_of_content
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.chat.answer_reader import AnswerReader, check_tools
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.context import Context
from pagedserve.server.fields import check_conversation
from pagedserve.server.http.errors import rename_fields
from pagedserve.server.job import GenerationJob
from pagedserve.server.limits import guessed_num_chat_tokens
from pagedserve.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from pagedserve.server.params import (
    FIELD_NAMES,
    chat_params,
    check_num_choices,
    num_equal_choices,
    salted,
)

# Names of the reasoning: vLLM's and DeepSeek's.
_BOTH: Final = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A validated chat, for the job of any API.

    Attributes:
        context: Context of the server.
        body: The chat.
        model: The ``model`` of the response.
        params: Sampling parameters.
        reader: Parser of the response.
        names: Format of tokens in log-probabilities.
    """

    context: Context
    body: ChatBody
    model: str
    params: SamplingParams
    reader: AnswerReader
    names: TokenNames

    @property
    def prompt_sizes(self) -> list[int]:
        """Approximate number of tokens of its single prompt."""
        return [guessed_num_chat_tokens(self.body.messages)]

    @property
    def lora_request(self) -> LoRARequest | None:
        """Adapter to use."""
        return self.context.adapters.get(self.model)

    async def prompts(self) -> list[Prompt]:
        """Render its single prompt."""
        return self.rendered(await self.context.text.chat_prompt(self.body))

    def rendered(self, prompt: TokensPrompt) -> list[Prompt]:
        """Complete its prompt for the engine, and begin to parse after it."""
        self.reader.begin_behind(prompt.get("prompt") or "")
        token_ids = self.context.text.truncated(prompt["prompt_token_ids"], self.body)
        prompt["prompt_token_ids"] = token_ids
        return [salted(prompt, self.body)]


async def prepare_chat(context: Context, body: ChatBody) -> PreparedChat:
    """Validate a chat.

    Raises:
        RequestError: Fields are invalid.
        ServerError: Unknown model, or the model is still loading.
    """
    model = await context.model_for(body)
    check_conversation(body.messages)
    check_num_choices(body, context.admission.max_num_seqs)
    context.text.check_prediction(body)
    check_tools(body)
    reader = await context.text.answer_reader(body)
    reader.is_json = body.response_format is not None and body.response_format.type != "text"
    known = reader.tools if reader.is_json and body.usable_tools else None
    starts = () if known is None or known.is_generic else known.starts
    shows_tags = await context.text.has_special(reader.tags)
    default = context.default_params.result()
    make_params = partial(
        chat_params,
        body,
        default,
        tools=reader.tools,
        token_ids=context.text.added_token_ids(starts),
        shows_tags=shows_tags,
        closes=context.args.close_schemas,
    )
    params = await context.for_body(make_params, num_bytes=body.num_bytes)
    held = params.structured_outputs
    reader.is_held = held is not None and held.given_as == "tools"
    is_free = held is None or (reader.is_held and body.choice == "auto" and not reader.is_json)
    reader.may_reason = is_free or params.thinking_token_budget is not None
    detokenizer = await context.text.detokenizer(skip_special_tokens=not body.shows_special_tokens)
    names = TokenNames(detokenizer, body.return_tokens_as_token_ids)
    return PreparedChat(
        context=context, body=body, model=model, params=params, reader=reader, names=names
    )


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of another API in errors, in the place of those of a chat.

    Args:
        names: What to write instead of fields and quoted values of a chat.
    """
    try:
        yield
    except RequestError as error:
        rename_fields(error, names)
        raise


async def chat_job(context: Context, body: ChatBody, answer_id: str) -> GenerationJob:
    """Create the job of a chat completion; it raises as ``prepare_chat`` does."""
    chat = await prepare_chat(context, body)
    role = context.args.response_role if body.add_generation_prompt else _last(body, "role")
    return GenerationJob(
        context=context,
        body=body,
        params=chat.params,
        prompt_sizes=chat.prompt_sizes,
        make_prompts=chat.prompts,
        choices=ChatChoices(
            body=body,
            names=chat.names,
            role=role,
            echoed=_echoed(body, role),
            reader=chat.reader,
            reasoning_field=context.args.reasoning_field,
        ),
        answer_id=answer_id,
        model=chat.model,
        lora_request=chat.lora_request,
        num_equal=num_equal_choices(body, chat.params),
    )


def _last(body: ChatBody, key: str) -> str:
    return text_of_content(body.messages[-1].get(key))


def _echoed(body: ChatBody, role: str) -> str:
    """The last message, if the response continues it and echo is requested."""
    return _last(body, "content") if body.echo and _last(body, "role") == role else ""


def _parts(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a delta into reasoning, content and single calls: some clients read one of them."""
    calls = fields.get("tool_calls", ())
    reasoning = {name: fields[name] for name in _BOTH if name in fields}
    content = {"content": fields["content"]} if "content" in fields else {}
    parts = [reasoning, content, *({"tool_calls": [call]} for call in calls)]
    return [part for part in parts if part] or [{}]


@dataclass(slots=True, kw_only=True)
class ChatChoices:
    """Format of chat choices; see ``Choices``."""

    body: ChatBody
    names: TokenNames
    role: str
    echoed: str
    reader: AnswerReader
    reasoning_field: str
    kind: str = "chat.completion"
    chunk_kind: str = "chat.completion.chunk"
    prompt_field: str = "messages"

    @property
    def field_names(self) -> Mapping[str, str]:  # noqa: D102
        return {"logprobs": "top_logprobs", **FIELD_NAMES}

    def opening(self, index: int) -> str:  # noqa: D102
        role = encode_basestring_ascii(self.role)
        text = encode_basestring_ascii(self.echoed)
        return (
            f'{{"index":{index},"delta":{{"role":{role},"content":{text}}},'
            '"logprobs":null,"finish_reason":null}'
        )

    def plain_delta(self, index: int, completion: CompletionOutput) -> str | None:  # noqa: D102
        if (
            self.reader.is_needed
            or completion.logprobs is not None
            or completion.finish_reason is not None
            or self.body.return_token_ids
        ):
            return None
        return (
            f'{{"index":{index},"delta":{{"content":{encode_basestring_ascii(completion.text)}}},'
            '"logprobs":null,"finish_reason":null}'
        )

    def deltas(  # noqa: D102
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> list[dict[str, Any]]:
        del output
        fields = self._fields(index, completion, is_delta=True)
        choice = self._choice(index, completion)
        if not (fields or choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice):
            return []
        chunks = [{**choice, "delta": part} for part in _parts(fields)]
        for earlier in chunks[:-1]:
            earlier |= {"finish_reason": None, "stop_reason": None}
        for later in chunks[1:]:
            later["logprobs"] = None
            later.pop("token_ids", None)
        return chunks

    def whole(  # noqa: D102
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        del output
        fields = self._fields(index, completion, is_delta=False)
        if self.echoed:
            fields["content"] = self.echoed + (fields["content"] or "")
        choice = self._choice(index, completion)
        choice["message"] = {"role": self.role, **fields}
        return choice

    def of_answer(self, output: RequestOutput) -> dict[str, Any]:  # noqa: D102
        more: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or ())
        if self.body.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        return more

    def _fields(
        self, index: int, completion: CompletionOutput, *, is_delta: bool
    ) -> dict[str, Any]:
        is_last = completion.finish_reason is not None
        fields = self.reader.fields(index, completion.text, is_last=is_last, is_delta=is_delta)
        if (reasoning := fields.pop("reasoning", None)) is None:
            return fields
        names = _BOTH if self.reasoning_field == "both" else (self.reasoning_field,)
        return dict.fromkeys(names, reasoning) | fields

    def _choice(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if completion.logprobs is not None and self.body.logprobs:
            num_top = self.body.top_logprobs or 0
            token_ids, entries = completion.token_ids, completion.logprobs
            logprobs = chat_logprobs(self.names, num_top, token_ids, entries)
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": self.reader.finish_reason(index, completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

"""What the routes share: the engine, the names of its model and adapters, limits, draining."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, TypeVar

from pagedserve.chat import Conversation, chat_prompt, text_of_content
from pagedserve.engine.client import EngineClient
from pagedserve.errors import RequestError
from pagedserve.images import ImageRules
from pagedserve.inputs import TokensPrompt, check_unicode
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.pooling.rules import PoolingRules
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.adapters import ServedAdapters
from pagedserve.server.errors import ServerError
from pagedserve.server.limits import Admission
from pagedserve.server.metrics import Metrics
from pagedserve.server.options import ServerArgs
from pagedserve.server.protocol import Body, ChatBody, TokenizeBody
from pagedserve.server.tool_formats import REASONING_FORMATS, TOOL_FORMATS, tool_format_of
from pagedserve.server.tools import AnswerReader
from pagedserve.speech import SpeechRules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pagedserve.server.tracing import Tracer

T = TypeVar("T")

# More characters than that a token has in no text that is meant.
_CHARS_PER_TOKEN: Final = 16


@dataclass(slots=True)
class Running:
    """An answer that is being made.

    Attributes:
        answer_id: Its id.
        names: What the engine calls its prompts.
        is_aborted: Whether somebody wants it ended.
    """

    answer_id: str
    names: list[str]
    is_aborted: bool = False


@dataclass(slots=True, kw_only=True)
class Context:
    """A server while it serves.

    Attributes:
        client: The engine.
        args: The server's options.
        names: Of the model; the first is shown.
        default_params: What the model's makers recommend; there before the model is.
        admission: Who is taken on.
        metrics: What is measured of requests.
        adapters: What is served under further names.
        tracer: Makes a span of each request; None makes none.
        created: When the server started, seconds of the wall clock.
        is_draining: Whether no more requests are taken.
        max_model_len: Tokens of a sequence; 0 before the model is loaded.
        num_open: Requests over HTTP that are being answered.
        chat_template: Instead of the model's own.
        jobs: Answers that are being made, by the engine's name of each.
    """

    client: EngineClient
    args: ServerArgs
    names: tuple[str, ...]
    default_params: Future[SamplingParams]
    admission: Admission
    metrics: Metrics
    adapters: ServedAdapters
    tracer: "Tracer | None" = None
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    max_model_len: int = 0
    num_open: int = 0
    chat_template: str | None = None
    jobs: dict[str, Running] = field(default_factory=dict)
    # One: a burst of templates is rendered in its order, and the engine begins with the first.
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), repr=False)
    _detokenizers: dict[bool, Detokenizer] = field(default_factory=dict, repr=False)

    async def check_ready(self) -> None:
        """Whether requests are taken now.

        Raises:
            ServerError: 503, with the reason.
        """
        if self.is_draining:
            raise ServerError(503, "the server is shutting down", retry_after=5)
        if self.client.errored:
            raise ServerError(503, str(self.client.dead_error))
        if not (self.client.is_running and self.admission.max_num_seqs):
            raise ServerError(503, "the model is being loaded", retry_after=5)

    async def abort(self, running: Running) -> None:
        """End an answer; one whose prompts are still being made ends when they are."""
        running.is_aborted = True
        await self.client.abort(running.names)

    @property
    def max_num_chars(self) -> int:
        """Of a text that is worth tokenising."""
        return _CHARS_PER_TOKEN * self.max_model_len

    async def check_generates(self) -> None:
        """Whether the model makes tokens.

        Raises:
            ServerError: 400, it pools.
        """
        if (await self.client.get_model_config()).pooling is not None:
            raise ServerError(
                400,
                "the model pools, and makes no text; accepted are embeddings, classifications, "
                "scores and rankings",
            )

    async def speech_rules(self) -> SpeechRules:
        """How the model writes speech down.

        Raises:
            ServerError: 400, it hears nothing.
        """
        known = (await self.client.get_model_config()).encoder_decoder
        if known is None or known.speech is None:
            raise ServerError(400, "the model hears no audio; accepted is a model such as Whisper")
        return known.speech

    async def pooling_rules(self) -> PoolingRules:
        """How the model pools.

        Raises:
            ServerError: 400, it generates.
        """
        rules = (await self.client.get_model_config()).pooling
        if rules is None:
            raise ServerError(
                400,
                "the model generates; accepted are completions and chats, or a server with "
                "--runner pooling",
            )
        return rules

    async def aside(self, make: Callable[[], T]) -> T:
        """What is made outside the event loop, one after another."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, make)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with.

        Raises:
            ServerError: 404, another model.
        """
        if asked is not None and asked not in self.names and self.adapters.get(asked) is None:
            raise ServerError(404, f"The model `{asked}` does not exist.", param="model")
        return asked or self.names[0]

    async def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """Texts and bytes of tokens; special ones have a name whether or not texts show them."""
        if skip_special_tokens not in self._detokenizers:
            self._detokenizers[skip_special_tokens] = Detokenizer(
                await self.client.get_tokenizer(), skip_special_tokens=skip_special_tokens
            )
        return self._detokenizers[skip_special_tokens]

    async def answer_reader(self, body: ChatBody) -> AnswerReader:
        """Who reads the choices of a chat: by the options, else as its template writes calls.

        Raises:
            RequestError: Tools that the model may choose, and nobody knows how it calls them.
        """
        args, tools, tokenizer = self.args, None, await self.client.get_tokenizer()
        if args.tool_call_parser is not None:
            tools = TOOL_FORMATS[args.tool_call_parser]
        elif body.usable_tools:
            template = body.chat_template or self.chat_template or tokenizer.chat_template
            tools = tool_format_of(str(template))
            if tools is None and body.tool_choice in (None, "auto"):
                raise RequestError(
                    "tools is given, and the model's chat template does not say how it calls them: "
                    "give tool_choice 'required' or a name, or start with --tool-call-parser",
                    param="tools",
                )
        reasoning = None
        if args.reasoning_parser is not None:
            reasoning = REASONING_FORMATS[args.reasoning_parser]
        return AnswerReader(body=body, tools=tools, reasoning=reasoning)

    async def has_special(self, tags: Collection[str]) -> bool:
        """Whether texts leave one of these tags out unless special tokens are shown."""
        special = (await self.client.get_tokenizer()).all_special_tokens if tags else ()
        return any(token in tag for tag in tags for token in special)

    async def chat_prompt(self, body: ChatBody | TokenizeBody) -> TokensPrompt:
        """The prompt that a conversation is, made outside the event loop.

        Raises:
            RequestError: Messages that the template does not take.
            ServerError: A template of the request where that is not allowed.
        """
        if body.chat_template is not None and not self.args.trust_request_chat_template:
            raise ServerError(
                400,
                "chat_template is given; the server takes none (--trust-request-chat-template)",
                param="chat_template",
            )
        texts = [text_of_content(message.get("content")) for message in body.messages or ()]
        self.check_length("".join(texts), "the messages")
        tokenizer = await self.client.get_tokenizer()
        images = (await self.client.get_model_config()).images
        return await self.aside(partial(self._render, tokenizer, body, images))

    def check_length(self, text: str, name: str) -> None:
        """Refuse a text that is too long to be worth tokenising.

        Raises:
            RequestError: It has more than 16 characters for each token of the longest sequence.
        """
        most = self.max_num_chars
        if len(text) > most:
            raise RequestError(f"{name} has {len(text)} characters; at most {most} are accepted")

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text, made outside the event loop.

        Raises:
            RequestError: Text that is too long, or no valid Unicode.
        """
        self.check_length(text, "the prompt")
        check_unicode(text, "the prompt")
        tokenizer: Any = await self.client.get_tokenizer()
        encode = partial(tokenizer, text, add_special_tokens=add_special_tokens, verbose=False)
        token_ids: list[int] = (await self.aside(encode)).input_ids
        return token_ids

    def truncated(self, token_ids: Sequence[SupportsIndex], body: Body) -> Sequence[SupportsIndex]:
        """The first tokens of a prompt, where its end is to be left out; else all of them.

        Its beginning is left out by the engine, by ``SamplingParams.truncate_prompt_tokens``.
        """
        if body.truncation_side == "left" or body.truncate_prompt_tokens is None:
            return token_ids
        most = body.truncate_prompt_tokens
        return token_ids[: self.max_model_len - 1 if most == -1 else most]

    async def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, made outside the event loop.

        Raises:
            ServerError: 400, a token that the vocabulary does not have.
        """
        if len(token_ids) > self.max_model_len:
            text = f"tokens has {len(token_ids)} ids; at most {self.max_model_len} are accepted"
            raise ServerError(400, text, param="tokens")
        vocab_size = (await self.client.get_model_config()).vocab_size
        tokenizer: Any = await self.client.get_tokenizer()

        def decoded() -> str:
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                accepted = f"token ids from 0 to {vocab_size - 1}"
                raise ServerError(400, f"tokens must be {accepted}", param="tokens")
            text: str = tokenizer.decode(token_ids) if token_ids else ""
            return text

        return await self.aside(decoded)

    async def token_strings(self, token_ids: list[int]) -> list[str]:
        """What the vocabulary calls tokens, looked up outside the event loop."""
        tokenizer: Any = await self.client.get_tokenizer()
        look_up: Callable[[], list[str]] = partial(tokenizer.convert_ids_to_tokens, token_ids)
        return await self.aside(look_up)

    def _render(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        body: ChatBody | TokenizeBody,
        images: ImageRules | str,
    ) -> TokensPrompt:
        messages: Conversation = body.messages or []
        return chat_prompt(
            tokenizer,
            messages,
            chat_template=body.chat_template or self.chat_template,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=_tools_of(body),
            images=images,
        )


def _tools_of(body: ChatBody | TokenizeBody) -> list[dict[str, Any]] | None:
    """The tools that a template is shown; None for none."""
    tools = body.usable_tools if isinstance(body, ChatBody) else []
    return [tool.model_dump(exclude_none=True) for tool in tools] or None

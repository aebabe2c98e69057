"""State shared by the routes: engine, model names, adapters, limits and draining."""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

from pagedserve.chat import Conversation, chat_prompt
from pagedserve.engine.client import EngineClient
from pagedserve.engine.lanes import Lanes
from pagedserve.errors import RequestError
from pagedserve.images import ImageRules
from pagedserve.inputs import TokensPrompt, check_unicode
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.pooling.rules import PoolingRules
from pagedserve.sampling_params import SamplingParams
from pagedserve.server.adapters import ServedAdapters
from pagedserve.server.bounds import CHARS_PER_TOKEN, SMALL_BODY_BYTES
from pagedserve.server.errors import ServerError
from pagedserve.server.limits import Admission
from pagedserve.server.metrics import Metrics
from pagedserve.server.options import ServerArgs
from pagedserve.server.protocol import Body, ChatBody, TokenizeBody
from pagedserve.server.tool_formats import REASONING_FORMATS, TOOL_FORMATS, tool_format_of
from pagedserve.server.tools import AnswerReader
from pagedserve.speech import SpeechRules
from pagedserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagedserve.server.tracing import Tracer

T = TypeVar("T")


@dataclass(slots=True)
class Running:
    """A response in progress.

    Attributes:
        answer_id: Id of the response.
        names: Request ids of its prompts in the engine.
        is_aborted: Whether an abort was requested.
    """

    answer_id: str
    names: list[str]
    is_aborted: bool = False


@dataclass(slots=True, kw_only=True)
class Context:
    """State of a running server.

    Attributes:
        client: The engine.
        args: Options of the server.
        names: Names of the model; responses have the first.
        default_params: Default sampling parameters; known before the model is loaded.
        admission: Admission control.
        metrics: Metrics of requests.
        adapters: Adapters served under further names.
        tracer: Creates a span per request; None disables tracing.
        created: Start of the server, seconds of the wall clock.
        is_draining: Whether new requests are refused.
        max_model_len: Maximum tokens of a sequence; 0 before the model is loaded.
        vocab_size: Vocabulary size; 0 before the model is loaded.
        num_open: Number of HTTP requests in progress.
        num_open_body_bytes: Bytes of bodies that are incomplete or not parsed.
        chat_template: Overrides the model's chat template.
        jobs: Responses in progress, by their ids in the engine.
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
    vocab_size: int = 0
    num_open: int = 0
    num_open_body_bytes: int = 0
    chat_template: str | None = None
    jobs: dict[str, Running] = field(default_factory=dict)
    _lanes: Lanes = field(default_factory=lambda: Lanes("pagedserve-server"), repr=False)
    _detokenizers: dict[bool, Detokenizer] = field(default_factory=dict, repr=False)

    async def check_ready(self) -> None:
        """Check that requests are accepted.

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
        """Abort a response; one whose prompts are still being prepared ends after that."""
        running.is_aborted = True
        await self.client.abort(running.names)

    @property
    def max_num_chars(self) -> int:
        """Maximum characters of a text to be tokenized."""
        return CHARS_PER_TOKEN * self.max_model_len

    async def check_generates(self) -> None:
        """Check that the model is a generative model.

        Raises:
            ServerError: 400, it is a pooling model.
        """
        if (await self.client.get_model_config()).pooling is not None:
            raise ServerError(
                400,
                "the model pools, and makes no text; accepted are embeddings, classifications, "
                "scores and rankings",
            )

    async def speech_rules(self) -> SpeechRules:
        """Speech tokens of the model.

        Raises:
            ServerError: 400, it does not accept audio.
        """
        known = (await self.client.get_model_config()).encoder_decoder
        if known is None or known.speech is None:
            raise ServerError(400, "the model does not accept audio; serve a model such as Whisper")
        return known.speech

    async def pooling_rules(self) -> PoolingRules:
        """Pooling configuration of the model.

        Raises:
            ServerError: 400, it is a generative model.
        """
        rules = (await self.client.get_model_config()).pooling
        if rules is None:
            raise ServerError(
                400,
                "the model generates; accepted are completions and chats, or a server with "
                "--runner pooling",
            )
        return rules

    async def aside(self, make: Callable[[], T], *, cost: int) -> T:
        """Run a function outside the event loop; ``cost`` is as in ``Lanes``."""
        return await self._lanes.run(make, cost=cost, group=object())

    async def for_body(self, make: Callable[[], T], *, num_bytes: int) -> T:
        """Run a function of a body.

        For a small body it takes less than a thread switch, and runs in the event loop; for others
        as by ``aside``.
        """
        return make() if num_bytes <= SMALL_BODY_BYTES else await self.aside(make, cost=num_bytes)

    def model_name(self, asked: str | None) -> str:
        """Return the model name for the response.

        Raises:
            ServerError: 404, unknown model.
        """
        if asked is not None and asked not in self.names and self.adapters.get(asked) is None:
            raise ServerError(404, f"The model `{asked}` does not exist.", param="model")
        return asked or self.names[0]

    async def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """Return a detokenizer; special tokens have names even if they are skipped in texts."""
        if skip_special_tokens not in self._detokenizers:
            self._detokenizers[skip_special_tokens] = Detokenizer(
                await self.client.get_tokenizer(), skip_special_tokens=skip_special_tokens
            )
        return self._detokenizers[skip_special_tokens]

    async def answer_reader(self, body: ChatBody) -> AnswerReader:
        """Create the parser of a chat's choices: by the options, else by the chat template.

        Raises:
            RequestError: Automatic tool choice, and the model's tool call format is unknown.
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
        """Whether the detokenizer drops any of these tags as special tokens."""
        return bool(tags) and (await self.detokenizer(skip_special_tokens=True)).hides(tags)

    async def chat_prompt(self, body: ChatBody | TokenizeBody) -> TokensPrompt:
        """Render a conversation to a prompt, outside the event loop.

        Raises:
            RequestError: The template does not accept the messages.
            ServerError: A chat template in the request, which is not allowed.
        """
        if body.chat_template is not None and not self.args.trust_request_chat_template:
            raise ServerError(
                400,
                "chat_template is given; the server takes none (--trust-request-chat-template)",
                param="chat_template",
            )
        tokenizer = await self.client.get_tokenizer()
        images = (await self.client.get_model_config()).images
        return await self.aside(partial(self._render, tokenizer, body, images), cost=body.num_bytes)

    def check_length(self, text: str, name: str) -> None:
        """Refuse a text that is too long to tokenize.

        Raises:
            RequestError: It has more than 16 characters per token of ``max_model_len``.
        """
        most = self.max_num_chars
        if len(text) > most:
            raise RequestError(f"{name} has {len(text)} characters; at most {most} are accepted")

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a text outside the event loop.

        Raises:
            RequestError: The text is too long, or not valid Unicode.
        """
        self.check_length(text, "the prompt")
        check_unicode(text, "the prompt")
        tokenizer: Any = await self.client.get_tokenizer()
        encode = partial(tokenizer, text, add_special_tokens=add_special_tokens, verbose=False)
        token_ids: list[int] = (await self.aside(encode, cost=len(text))).input_ids
        return token_ids

    def truncated(self, token_ids: Sequence[SupportsIndex], body: Body) -> Sequence[SupportsIndex]:
        """Truncate a prompt on the right, if requested; else return it unchanged.

        The engine truncates on the left, by ``SamplingParams.truncate_prompt_tokens``.
        """
        if body.truncation_side == "left" or body.truncate_prompt_tokens is None:
            return token_ids
        most = body.truncate_prompt_tokens
        return token_ids[: self.max_model_len - 1 if most == -1 else most]

    async def decode(self, token_ids: list[int]) -> str:
        """Decode tokens outside the event loop.

        Raises:
            ServerError: 400, a token id is not in the vocabulary.
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

        return await self.aside(decoded, cost=len(token_ids))

    async def token_strings(self, token_ids: list[int]) -> list[str]:
        """Look up the vocabulary's strings of tokens, outside the event loop."""
        tokenizer: Any = await self.client.get_tokenizer()
        look_up: Callable[[], list[str]] = partial(tokenizer.convert_ids_to_tokens, token_ids)
        return await self.aside(look_up, cost=len(token_ids))

    def _render(
        self,
        tokenizer: Tokenizer,
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
            chat_template_kwargs=_variables_of(body),
            tools=_tools_of(body),
            images=images,
        )


def _tools_of(body: ChatBody | TokenizeBody) -> list[dict[str, Any]] | None:
    """Tools for the template; None if there are none."""
    tools = body.usable_tools if isinstance(body, ChatBody) else []
    return [tool.model_dump(exclude_none=True) for tool in tools] or None


def _variables_of(body: ChatBody | TokenizeBody) -> dict[str, Any] | None:
    """Further variables of the template; None if there are none."""
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is None:
        return body.chat_template_kwargs
    return {"reasoning_effort": effort, **(body.chat_template_kwargs or {})}

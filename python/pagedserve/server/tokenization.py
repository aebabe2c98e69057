"""Texts and conversations of requests, converted to tokens and back outside the event loop."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, SupportsIndex, TypeVar

from pagedserve.config.reasoning import REASONING_FORMATS
from pagedserve.decisions.prompts import Asked, DecisionPrompts
from pagedserve.engine.client import EngineClient
from pagedserve.engine.lanes import Lanes
from pagedserve.errors import RequestError
from pagedserve.inputs import BranchedPrompt, TokensPrompt
from pagedserve.inputs.chat import Conversation, chat_prompt, check_variables
from pagedserve.inputs.images import ImageRules
from pagedserve.inputs.prompts import check_unicode
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.server.chat.answer_reader import AnswerReader, is_chosen_by_model
from pagedserve.server.chat.protocol import ChatBody
from pagedserve.server.completions.infill import InfillFormat, infill_format
from pagedserve.server.http.bounds import CHARS_PER_TOKEN
from pagedserve.server.http.errors import ServerError
from pagedserve.server.options import ServerArgs
from pagedserve.server.protocol import Body, TemplatedBody
from pagedserve.server.tokens.protocol import TokenizerInfo
from pagedserve.server.tools.custom import with_functions
from pagedserve.server.tools.fields import lark_inputs
from pagedserve.server.tools.formats import TOOL_FORMATS, ToolFormat, tool_format_of, with_ids
from pagedserve.server.tools.generic import plain_conversation
from pagedserve.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Tokenization:
    """The tokenizer and the chat template of a server's model.

    Attributes:
        client: The engine.
        args: Options of the server.
        chat_template: Overrides the model's chat template.
        lanes: Threads for what may take long.
        max_model_len: Maximum tokens of a sequence; 0 before the model is loaded.
        vocab_size: Vocabulary size; 0 before the model is loaded.
    """

    client: EngineClient
    args: ServerArgs
    chat_template: str | None
    lanes: Lanes
    max_model_len: int = 0
    vocab_size: int = 0
    _detokenizers: dict[bool, Detokenizer] = field(default_factory=dict, repr=False)
    _infill: InfillFormat | None = field(default=None, repr=False)
    _decisions: DecisionPrompts | None = field(default=None, repr=False)

    async def _aside(self, make: Callable[[], T], *, cost: int) -> T:
        return await self.lanes.run(make, cost=cost, group=object())

    @property
    def max_num_chars(self) -> int:
        """Maximum characters of a text to be tokenized."""
        return CHARS_PER_TOKEN * self.max_model_len

    async def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """Return a detokenizer; special tokens have names even if they are skipped in texts."""
        if skip_special_tokens not in self._detokenizers:
            self._detokenizers[skip_special_tokens] = Detokenizer(
                self.client.tokenizer, skip_special_tokens=skip_special_tokens
            )
        return self._detokenizers[skip_special_tokens]

    async def answer_reader(self, body: ChatBody) -> AnswerReader:
        """Create the parser of a chat's choices: by the options, else by the chat template.

        Raises:
            RequestError: Automatic tool choice, and the model's tool call format is unknown.
        """
        args, tools = self.args, self._tool_format(body.chat_template)
        if tools is None and is_chosen_by_model(body):
            raise RequestError(
                "tools is given, and the model's chat template does not say how it calls them: "
                "give tool_choice 'required' or a name, or start with --tool-call-parser",
                param="tools",
            )
        reasoning = None
        if args.reasoning_parser is not None:
            reasoning = REASONING_FORMATS[args.reasoning_parser]
        return AnswerReader(body=body, tools=tools, reasoning=reasoning)

    @property
    def is_generic(self) -> bool:
        """Whether chats with tools have the generic format."""
        known = self._tool_format(None) if self._template(None) else None
        return known is not None and known.is_generic

    @property
    def reads_tool_calls(self) -> bool:
        """Whether the model may choose to call tools: the format of its calls is known."""
        return self._tool_format(None) is not None

    @property
    def shown_template(self) -> str:
        """The chat template of requests; empty without one."""
        template = self._template(None) or ""
        return template if isinstance(template, str) else template.get("default", "")

    @property
    def tokenizer_info(self) -> TokenizerInfo:
        """The fields of tokenizer_config.json that clients read, without paths."""
        tokenizer = self.client.tokenizer
        added = tokenizer.added_tokens_decoder.items()
        fields = {
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": self.max_model_len,
            "added_tokens_decoder": {token_id: token.content for token_id, token in added},
            "chat_template": self.shown_template or None,
        }
        # Tokenizers of users may lack them.
        named = getattr(tokenizer, "special_tokens_map", {})
        return TokenizerInfo.model_validate({**named, **fields})

    def check_defaults(self) -> None:
        """Check the variables of the chat template that the server sets by default.

        Raises:
            RequestError: One of them is no variable of a template.
        """
        check_variables(self.client.tokenizer, self.variables({}), "default_chat_template_kwargs")

    def variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Variables of the chat template for a request that sets those that are given."""
        return {**(self.args.default_chat_template_kwargs or {}), **given}

    def _template(self, given: str | None) -> str | dict[str, str] | None:
        """The chat template of a request, which may have given its own; several by name."""
        return given or self.chat_template or self.client.tokenizer.chat_template

    def _tool_format(self, given: str | None) -> ToolFormat | None:
        """Tool call format: by the options, else by the chat template; None if it is unknown."""
        if self.args.tool_call_parser is not None:
            return TOOL_FORMATS[self.args.tool_call_parser]
        found = tool_format_of(str(self._template(given) or ""))
        is_off = found is not None and found.is_generic and not self.args.generic_tool_calls
        return None if is_off else found

    async def has_special(self, tags: Collection[str]) -> bool:
        """Whether the detokenizer drops any of these tags as special tokens."""
        return bool(tags) and (await self.detokenizer(skip_special_tokens=True)).hides(tags)

    def added_token_ids(self, tags: Iterable[str]) -> list[list[int]]:
        """Token ids of those of these tags that consist of added tokens."""
        tokenizer = self.client.tokenizer
        added = tokenizer.added_tokens_decoder
        encoded = [tokenizer.encode(tag, add_special_tokens=False) for tag in tags]
        return [ids for ids in encoded if ids and all(token_id in added for token_id in ids)]

    async def chat_prompt(self, body: TemplatedBody) -> TokensPrompt:
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
        tokenizer = self.client.tokenizer
        images = (await self.client.get_model_config()).images
        return await self._aside(
            partial(self._render, tokenizer, body, images), cost=body.num_bytes
        )

    async def chat_token_ids(self, body: TemplatedBody) -> list[int]:
        """Render and tokenize a conversation, outside the event loop.

        Raises:
            RequestError: The template does not accept the messages, or they have images.
            ServerError: 400, a chat template that is not allowed.
        """
        return token_ids_of(await self.chat_prompt(body))

    async def decision_prompt(self, asked: Asked, *, num_bytes: int) -> BranchedPrompt:
        """Render the questions of a decision to a prompt, outside the event loop.

        Args:
            asked: State and questions.
            num_bytes: Size of the request.

        Raises:
            RequestError: As ``DecisionPrompts.make``.
        """
        if self._decisions is None:
            self._decisions = DecisionPrompts(self.client.tokenizer)
        # Every question is rendered with the state.
        cost = num_bytes * len(asked.questions)
        return await self._aside(partial(self._decisions.make, asked), cost=cost)

    def check_length(self, text: str, name: str, *, param: str | None = None) -> None:
        """Refuse a text that is too long to tokenize, given as the field ``param``.

        Raises:
            RequestError: It has more than 16 characters per token of ``max_model_len``.
        """
        most = self.max_num_chars
        if len(text) > most:
            message = f"{name} has {len(text)} characters; at most {most} are accepted"
            raise RequestError(message, param=param)

    async def infilled(self, prompts: Sequence[str], suffix: str) -> list[str]:
        """Render prompts with a suffix, in the model's fill-in-the-middle format.

        Raises:
            RequestError: The suffix is too long, or the tokenizer has no tokens for it.
        """
        self.check_length(suffix, "suffix", param="suffix")
        if self._infill is None:
            find = partial(_infill_format, self.client.tokenizer)
            self._infill = await self._aside(find, cost=self.vocab_size)
        return [self._infill.rendered(prompt, suffix) for prompt in prompts]

    def check_prediction(self, body: Body) -> None:
        """Refuse a prediction that is too long to tokenize; see `check_length`."""
        if body.prediction is not None:
            self.check_length(body.prediction.text, "prediction", param="prediction")

    async def encode(
        self, text: str, *, add_special_tokens: bool, param: str | None = None
    ) -> list[int]:
        """Tokenize a text, given as the field ``param``, outside the event loop.

        Raises:
            RequestError: The text is too long, or not valid Unicode.
        """
        self.check_length(text, "the prompt", param=param)
        return await self._encoded(text, add_special_tokens=add_special_tokens)

    async def prefix(self, text: str, num_tokens: int) -> str:
        """Return a prefix that has at least ``num_tokens`` tokens; the text if it has fewer.

        Raises:
            RequestError: The text is not valid Unicode.
        """
        length = self.max_num_chars
        while length < len(text):
            token_ids = await self._encoded(text[:length], add_special_tokens=False)
            if len(token_ids) >= num_tokens:
                break
            length *= 2
        return text[:length]

    async def _encoded(self, text: str, *, add_special_tokens: bool) -> list[int]:
        check_unicode(text, "the prompt")
        tokenizer: Any = self.client.tokenizer
        encode = partial(tokenizer, text, add_special_tokens=add_special_tokens, verbose=False)
        token_ids: list[int] = (await self._aside(encode, cost=len(text))).input_ids
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
        tokenizer: Any = self.client.tokenizer

        def decoded() -> str:
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
                accepted = f"token ids from 0 to {vocab_size - 1}"
                raise ServerError(400, f"tokens must be {accepted}", param="tokens")
            text: str = tokenizer.decode(token_ids) if token_ids else ""
            return text

        return await self._aside(decoded, cost=len(token_ids))

    async def token_strings(self, token_ids: list[int]) -> list[str]:
        """Look up the vocabulary's strings of tokens, outside the event loop."""
        tokenizer: Any = self.client.tokenizer
        look_up: Callable[[], list[str]] = partial(tokenizer.convert_ids_to_tokens, token_ids)
        return await self._aside(look_up, cost=len(token_ids))

    def _render(
        self,
        tokenizer: Tokenizer,
        body: TemplatedBody,
        images: ImageRules | str,
    ) -> TokensPrompt:
        render = partial(
            chat_prompt,
            tokenizer,
            chat_template=body.chat_template or self.chat_template,
            chat_template_kwargs=self.variables(_variables_of(body)),
            images=images,
        )
        messages: Conversation = with_functions(body.messages or [])
        tools = [tool.for_template() for tool in body.usable_tools] or None
        known = self._tool_format(body.chat_template)
        if known is not None and known.is_generic:
            has_system = bool(tools) and _shows_system(render)
            verbatim = lark_inputs(body.usable_tools)
            messages = plain_conversation(messages, tools or (), verbatim, has_system=has_system)
            tools = None
        if known is not None and known.id_length is not None:
            messages = with_ids(messages, known.id_length)
        return render(
            messages,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            tools=tools,
        )


def token_ids_of(prompt: TokensPrompt) -> list[int]:
    """Return the token ids of a rendered conversation.

    Raises:
        RequestError: It has images.
    """
    if "multi_modal_data" in prompt:
        text = "messages has images, whose tokens are not known before they are run"
        raise RequestError(text, param="messages")
    return [*map(int, prompt["prompt_token_ids"])]


def _infill_format(tokenizer: Tokenizer) -> InfillFormat:
    return infill_format(tokenizer.get_vocab())


def _shows_system(render: Callable[[Conversation], TokensPrompt]) -> bool:
    """Whether a template shows a system message; others refuse it, or pass over it."""
    probe = [{"role": "system", "content": "probe"}, {"role": "user", "content": "?"}]
    try:
        return "probe" in (render(probe).get("prompt") or "")
    except RequestError:
        return False


def _variables_of(body: TemplatedBody) -> dict[str, Any]:
    """Further variables of the template that a request sets."""
    return body.template_fields | (body.chat_template_kwargs or {})

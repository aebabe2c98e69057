"""Bodies of the Messages API: their fields and types.

Fields without effect here are part of the types, and passed over; any other unknown field is
refused by name.
"""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, model_validator

from pagedserve.errors import RequestError
from pagedserve.server.fields import NullsLeftOut
from pagedserve.server.protocol import ANTHROPIC_HARMLESS, EngineBody

# Names of tools, and ids of their calls.
_Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class _Part(NullsLeftOut):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid")


class _Cacheable(_Part):
    """A part that may end a cached prefix; every prefix is cached here."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Cacheable):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class Base64Source(_Part):
    """An image in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def url(self) -> str:
        """A data URL of the image."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(_Part):
    """An image in a data URL; the server fetches no other URL."""

    type: Literal["url"]
    url: str


class ImageBlock(_Cacheable):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class PlainTextSource(_Part):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class NoCitations(_Part):
    """Responses cite no document."""

    enabled: Literal[False] = False


class DocumentBlock(_Cacheable):
    """A document of plain text."""

    type: Literal["document"]
    source: PlainTextSource
    title: str | None = None
    context: str | None = None
    citations: NoCitations | None = None

    @property
    def text(self) -> str:
        """Its title, its context and its text."""
        return "\n\n".join(filter(None, (self.title, self.context, self.source.data)))


class ThinkingBlock(_Part):
    """Reasoning of an earlier response."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Part):
    """Reasoning that only the model that generated it can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Cacheable):
    """A tool call of an earlier response."""

    type: Literal["tool_use"]
    id: _Name
    name: str  # the model may have made it up
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


def _as_blocks(given: Any) -> Any:
    """Convert a string to one block of text."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


class ToolReferenceBlock(_Cacheable):
    """Name of a deferred tool that the model may call from then on."""

    type: Literal["tool_reference"]
    tool_name: _Name


_Shown: TypeAlias = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock, Field(discriminator="type")
]
_Text: TypeAlias = Annotated[
    list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]
_Result: TypeAlias = Annotated[
    list[_Shown], BeforeValidator(_as_blocks, json_schema_input_type=str | list[_Shown])
]


class ToolResultBlock(_Cacheable):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: _Name
    content: _Result = Field(default_factory=list)
    is_error: bool = False


Block: TypeAlias = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock,
    Field(discriminator="type"),
]
_Content: TypeAlias = Annotated[
    list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
]


class MessageParam(_Part):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: _Content


class ToolParam(_Cacheable):
    """A tool that the model may call."""

    type: Literal["custom"] = "custom"
    name: _Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool = False
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: list[dict[str, Any]] = Field(default_factory=list)


class ToolChoice(_Part):
    """Whether and how the model uses the tools."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(_Part):
    """The tool that the model must use."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool = False


class Thinking(_Part):
    """Whether the model reasons before it answers, where its chat template knows a switch."""

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=0)
    display: Literal["summarized", "updates", "omitted"] = "summarized"
    block_binding: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.budget_tokens is not None and self.type != "enabled":
            raise RequestError(
                f"thinking.budget_tokens is {self.budget_tokens} with thinking.type "
                f"{self.type!r}; a budget is for 'enabled' alone",
                param="thinking",
            )
        return self


class OutputFormat(_Part):
    """A JSON schema of the response's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    """Format of the response's text, and how much effort it takes."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AllTurns(_Part):
    """All turns of the conversation."""

    type: Literal["all"]


class ThinkingTurns(_Part):
    """The last turns that have reasoning."""

    type: Literal["thinking_turns"]
    value: int = Field(ge=1)


def _as_turns(given: Any) -> Any:
    """Convert a string to the turns of that type."""
    return {"type": given} if isinstance(given, str) else given


_Turns: TypeAlias = Annotated[AllTurns | ThinkingTurns, Field(discriminator="type")]
_Kept: TypeAlias = Annotated[
    _Turns, BeforeValidator(_as_turns, json_schema_input_type=Literal["all"] | _Turns)
]


class ClearThinking(_Part):
    """Removal of earlier reasoning from the conversation."""

    type: Literal["clear_thinking_20251015"]
    keep: _Kept | None = None


class ContextManagement(_Part):
    """Edits of the conversation before it becomes the prompt."""

    edits: list[ClearThinking] = Field(default_factory=list)

    @property
    def num_thinking_turns(self) -> int | None:
        """Number of turns that keep their reasoning; None keeps all of it."""
        kept = [edit.keep.value for edit in self.edits if isinstance(edit.keep, ThinkingTurns)]
        return min(kept, default=None)


class CountTokensBody(EngineBody):
    """``POST /v1/messages/count_tokens``: what becomes the prompt."""

    may_have_images: ClassVar[bool] = True
    harmless: ClassVar[frozenset[str]] = ANTHROPIC_HARMLESS
    absent: ClassVar[dict[str, tuple[object, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "thread": (),
    }

    messages: list[MessageParam] = Field(min_length=1)
    system: _Text = Field(default_factory=list)
    tools: list[ToolParam] = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice | NamedToolChoice | None, Field(discriminator="type")] = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: OutputFormat | None = Field(
        default=None, description="The earlier name of ``output_config.format``."
    )
    context_management: ContextManagement = Field(default_factory=ContextManagement)


class MessagesBody(CountTokensBody):
    """``POST /v1/messages``."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class TextContent(BaseModel):
    """Text of a response."""

    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingContent(BaseModel):
    """Reasoning of a response."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(BaseModel):
    """A tool call of a response."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageUsage(BaseModel):
    """Token usage; the prompt has the sum of the three numbers of input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


OutputBlock: TypeAlias = Annotated[
    TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")
]


class StartedMessage(BaseModel):
    """A message at the start of its stream."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class Message(StartedMessage):
    """Response of ``POST /v1/messages``."""

    stop_reason: StopReason


class TokenCount(BaseModel):
    """Response of ``POST /v1/messages/count_tokens``."""

    input_tokens: int


class MessagesErrorDetail(BaseModel):
    """Description of an error."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class MessagesErrorBody(BaseModel):
    """Body of every error response of the Messages API, and the event that ends a failed stream."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class MessageStart(BaseModel):
    """The first event of a stream."""

    type: Literal["message_start"]
    message: StartedMessage


class Ping(BaseModel):
    """Event without contents."""

    type: Literal["ping"]


class ContentBlockStart(BaseModel):
    """Start of a content block, without its text."""

    type: Literal["content_block_start"]
    index: int
    content_block: OutputBlock


class TextDelta(BaseModel):
    """The next part of a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(BaseModel):
    """The next part of reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(BaseModel):
    """Signature of the reasoning, after all of it."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(BaseModel):
    """The next part of the JSON of a tool call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(BaseModel):
    """Delta of the open content block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[
        TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")
    ]


class ContentBlockStop(BaseModel):
    """End of a content block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(BaseModel):
    """Stop reason of a message."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """End of a message's contents."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(BaseModel):
    """The last event of a stream."""

    type: Literal["message_stop"]


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart
            | ContentBlockStart
            | Ping
            | ContentBlockDelta
            | ContentBlockStop
            | MessageDelta
            | MessageStop
            | MessagesErrorBody,
            Field(discriminator="type"),
        ]
    ]
):
    """Event of a streamed ``POST /v1/messages``."""

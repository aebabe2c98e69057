"""Requests and responses of the Responses API."""

from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, RootModel

from pagedserve.errors import RequestError
from pagedserve.server.chat.protocol import ReasoningEffort
from pagedserve.server.fields import JsonSchema, Metadata, NullsLeftOut
from pagedserve.server.http.bounds import MAX_ID_CHARS
from pagedserve.server.protocol import ABSENT, HARMLESS, MAX_INT, SamplingBody
from pagedserve.server.responses.items import Input, Item
from pagedserve.server.responses.tools import KnownTool, Tool
from pagedserve.server.tools.fields import ToolName

_MAX_TOP_LOGPROBS: Final = 20
LOGPROBS: Final = "message.output_text.logprobs"
OPAQUE_REASONING: Final = "reasoning.encrypted_content"


class NamedTool(ToolName):
    """A tool by its name."""

    type: Literal["function", "custom"]


class ResponseAllowedTools(NullsLeftOut):
    """Tools of the request that may be called, and whether one must be."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=512)]


class PlainText(NullsLeftOut):
    """Text without a format."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class JsonObject(NullsLeftOut):
    """Any JSON object."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_object"]


class SchemaFormat(JsonSchema):
    """JSON that is valid for a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] | bool = Field(alias="schema")


Format: TypeAlias = Annotated[PlainText | JsonObject | SchemaFormat, Field(discriminator="type")]


class TextConfig(NullsLeftOut):
    """Format of the text, and its verbosity, which is a variable of the chat template."""

    model_config = ConfigDict(extra="forbid")

    format: Format = Field(default_factory=partial(PlainText, type="text"))
    verbosity: Literal["low", "medium", "high"] | None = None


Summary: TypeAlias = Literal["auto", "concise", "detailed"]


class Reasoning(NullsLeftOut):
    """Reasoning of the model; where a summary is requested, all of it is the summary."""

    model_config = ConfigDict(extra="forbid")

    effort: ReasoningEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard"] | None = None

    @property
    def requested_summary(self) -> Summary | None:
        """The summary, by its newer or its older name."""
        return self.summary or self.generate_summary


Include: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Passed over: images are never left out, and there are no tools of these kinds.
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
]


class ResponsesBody(SamplingBody):
    """``POST /v1/responses``."""

    may_have_images: ClassVar[bool] = True
    harmless: ClassVar[frozenset[str]] = HARMLESS | {"client_metadata", "access_programs"}
    absent: ClassVar[dict[str, tuple[object, ...]]] = ABSENT | {
        "background": (False,),
        "background_options": (),
        "conversation": (),
        "context_management": ([],),
        "moderation": (),
        "prompt": (),
    }

    input: Input = ""
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=MAX_ID_CHARS)
    store: bool = True
    stream: bool = False
    stream_options: dict[str, Any] | None = Field(default=None, description="Passed over.")
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = Field(default=None, ge=1, description="Passed over.")
    text: TextConfig = Field(default_factory=TextConfig)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | ResponseAllowedTools = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    include: list[Include] = Field(default_factory=list)
    top_logprobs: int | None = Field(default=None, ge=0, le=_MAX_TOP_LOGPROBS)
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Metadata = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=-MAX_INT, le=MAX_INT)
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the text has log-probabilities."""
        return LOGPROBS in self.include or bool(self.top_logprobs)

    def check_fields(self, *, allows_unknown: bool) -> None:
        """Run the checks of all requests, and refuse fields that cannot be followed."""
        super().check_fields(allows_unknown=allows_unknown)
        if self.request_id is not None:
            raise RequestError(
                "request_id is given; the id of a response is made by the server",
                param="request_id",
            )
        if not self.input and self.previous_response_id is None:
            raise RequestError(
                "input is empty; without previous_response_id it must have a text or at least one "
                "item",
                param="input",
            )


_Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class OutputMessage(BaseModel):
    """Message of the model."""

    id: str
    type: Literal["message"]
    status: _Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(BaseModel):
    """Call of a function."""

    id: str
    type: Literal["function_call"]
    status: _Status
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class OutputCustomCall(BaseModel):
    """Call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: _Status
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OutputReasoningText(BaseModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputSummaryText(BaseModel):
    """Text of reasoning where a summary is requested."""

    type: Literal["summary_text"]
    text: str


class OutputReasoning(BaseModel):
    """Reasoning of the model, in one of its two lists."""

    id: str
    type: Literal["reasoning"]
    status: _Status
    summary: list[OutputSummaryText]
    content: list[OutputReasoningText]
    encrypted_content: str | None = None


OutputItem: TypeAlias = Annotated[
    OutputMessage | OutputCall | OutputCustomCall | OutputReasoning, Field(discriminator="type")
]


class InputTokensDetails(BaseModel):
    """Tokens of the input by where they came from."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Tokens of the output by what they are."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token usage of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Error that ended a response."""

    code: str
    message: str


class ResponseObject(BaseModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | NamedTool | ResponseAllowedTools
    tools: list[KnownTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None


class _Event(BaseModel):
    sequence_number: int


class ResponseChanged(_Event):
    """The response at the start of its stream, or at the end."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class OutputItemChanged(_Event):
    """An item at its start, without its text, or at its end."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _ItemEvent(_Event):
    item_id: str
    output_index: int


class ContentPartChanged(_ItemEvent):
    """The content of an item at its start, without its text, or at its end."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Annotated[OutputText | OutputReasoningText, Field(discriminator="type")]


class OutputTextDelta(_ItemEvent):
    """The next part of a message's text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[dict[str, Any]]


class OutputTextDone(_ItemEvent):
    """The whole text of a message."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[dict[str, Any]]


class ReasoningTextDelta(_ItemEvent):
    """The next part of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningTextDone(_ItemEvent):
    """The whole text of reasoning."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class SummaryPartChanged(_ItemEvent):
    """The summary of reasoning at its start, without its text, or at its end."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    summary_index: int
    part: OutputSummaryText


class SummaryTextDelta(_ItemEvent):
    """The next part of the summary of reasoning."""

    type: Literal["response.reasoning_summary_text.delta"]
    summary_index: int
    delta: str


class SummaryTextDone(_ItemEvent):
    """The whole text of the summary of reasoning."""

    type: Literal["response.reasoning_summary_text.done"]
    summary_index: int
    text: str


class CallDelta(_ItemEvent):
    """The next part of a call's arguments, or of a custom call's input."""

    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    delta: str


class CallArgumentsDone(_ItemEvent):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    arguments: str


class CallInputDone(_ItemEvent):
    """The whole input of a custom call."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ResponseEvent(
    RootModel[
        Annotated[
            ResponseChanged
            | OutputItemChanged
            | ContentPartChanged
            | OutputTextDelta
            | OutputTextDone
            | ReasoningTextDelta
            | ReasoningTextDone
            | SummaryPartChanged
            | SummaryTextDelta
            | SummaryTextDone
            | CallDelta
            | CallArgumentsDone
            | CallInputDone,
            Field(discriminator="type"),
        ]
    ]
):
    """Event of a streamed ``POST /v1/responses``."""


class InputTokens(BaseModel):
    """Number of tokens of the input of a response."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(BaseModel):
    """Confirmation of a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """A page of the items that a response was made from."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

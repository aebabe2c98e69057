"""Objects of the Responses API's answers, which ``/openapi.json`` describes."""

from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from pagedserve.server.responses.body import NamedTool, ResponseAllowedTools, Tool
from pagedserve.server.responses.items import Item

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
    arguments: str


class OutputCustomCall(BaseModel):
    """Call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: _Status
    call_id: str
    name: str
    input: str


class OutputReasoningText(BaseModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """Reasoning of the model."""

    id: str
    type: Literal["reasoning"]
    status: _Status
    summary: list[Any]
    content: list[OutputReasoningText]


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
    output: list[OutputMessage | OutputCall | OutputCustomCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | NamedTool | ResponseAllowedTools
    tools: list[Tool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None


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

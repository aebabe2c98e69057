"""Request and response of a chat completion."""

from typing import Any, Literal, Self, TypeAlias

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from pagedserve.server.fields import Messages, NullsLeftOut
from pagedserve.server.protocol import Body, PromptLogprobs, TemplatedBody, UsageInfo
from pagedserve.server.tools.fields import AllowedToolChoice, NamedTool, Tool

ToolMode: TypeAlias = Literal["none", "auto", "required"]
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingSwitch(NullsLeftOut):
    """Whether to reason, in the form of DeepSeek, Zhipu and Anthropic."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class ReasoningSwitch(NullsLeftOut):
    """Whether and how much to reason, in OpenRouter's form."""

    model_config = ConfigDict(extra="forbid")

    effort: ReasoningEffort | None = None
    enabled: bool | None = Field(
        default=None, description="The variable ``enable_thinking`` of the chat template."
    )
    exclude: bool = Field(default=False, description="The same as ``include_reasoning`` false.")
    max_tokens: int | None = Field(
        default=None, ge=0, description="Another name of ``thinking_token_budget``."
    )
    summary: str | None = Field(default=None, description="No effect: reasoning is whole.")


class ChatBody(Body, TemplatedBody):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        default=None,
        ge=1,
        validation_alias=AliasChoices("max_completion_tokens", "max_output_tokens"),
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=-1)
    add_special_tokens: Literal[False] = False
    tools: list[Tool] | None = None
    tool_choice: ToolMode | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool = Field(default=True, description="Whether there may be several.")
    think: bool | ReasoningEffort | None = Field(
        default=None, description="Ollama's name of ``enable_thinking`` or ``reasoning_effort``."
    )
    reasoning: ReasoningSwitch | None = None
    include_reasoning: bool = True
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="A variable of the chat template, which may read it."
    )
    verbosity: str | None = Field(default=None, description="Another such variable.")
    enable_thinking: bool | None = Field(default=None, description="Another such variable.")
    thinking: ThinkingSwitch | None = Field(
        default=None,
        description="Another form of ``enable_thinking``; auto and adaptive do not set it.",
    )

    @property
    def template_fields(self) -> dict[str, Any]:
        """Variables of the chat template that are fields."""
        names = ("reasoning_effort", "verbosity", "enable_thinking")
        fields = {name: getattr(self, name) for name in names}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def usable_tools(self) -> list[Tool]:
        """Tools that the model may or must call."""
        tools = self.tools or []
        if isinstance(self.tool_choice, AllowedToolChoice):
            allowed = {tool.name for tool in self.tool_choice.allowed_tools.tools}
            return [tool for tool in tools if tool.name in allowed]
        return [] if self.tool_choice == "none" else tools

    @property
    def choice(self) -> ToolMode | NamedTool:
        """How one of ``usable_tools`` is chosen."""
        if isinstance(self.tool_choice, AllowedToolChoice):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or "auto"

    @model_validator(mode="after")
    def _take_other_names(self) -> Self:
        """Take from fields of other APIs what no field of OpenAI's and vLLM's has."""
        switch = self.reasoning or ReasoningSwitch()
        thinks = [self.enable_thinking, switch.enabled]
        efforts = [self.reasoning_effort, switch.effort]
        if isinstance(self.think, bool):
            thinks.insert(1, self.think)
        else:
            efforts.insert(1, self.think)
        if self.thinking is not None and self.thinking.type in {"enabled", "disabled"}:
            thinks.append(self.thinking.type == "enabled")
        self.enable_thinking = next((value for value in thinks if value is not None), None)
        self.reasoning_effort = next((value for value in efforts if value is not None), None)
        self.include_reasoning &= not switch.exclude
        if self.thinking_token_budget is None:
            self.thinking_token_budget = switch.max_tokens
        return self


class TokenLogprob(BaseModel):
    """Log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """Log-probability of a token of the message, and of the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a choice's tokens."""

    content: list[ChosenLogprob]


class NamedArguments(BaseModel):
    """Function of a tool call; ``arguments`` is JSON."""

    name: str
    arguments: str


class FunctionCall(BaseModel):
    """Call of a function."""

    id: str
    type: Literal["function"]
    function: NamedArguments


class CustomInput(BaseModel):
    """A custom tool, and its input."""

    name: str
    input: str


class CustomCall(BaseModel):
    """Call of a custom tool."""

    id: str
    type: Literal["custom"]
    custom: CustomInput


class ChatMessage(BaseModel):
    """Message of the model; ``reasoning_content`` is another name of ``reasoning``."""

    role: str
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[FunctionCall | CustomCall] | None = None


class ChatChoice(BaseModel):
    """Choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ArgumentsDelta(BaseModel):
    """The next part of a call's arguments; the first has the name."""

    name: str | None = None
    arguments: str


class InputDelta(BaseModel):
    """The next part of a custom call's input; the first has the name."""

    name: str | None = None
    input: str


class ToolCallDelta(BaseModel):
    """Delta of a tool call; only the first has the id and the type."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: ArgumentsDelta | None = None
    custom: InputDelta | None = None


class ChatDelta(BaseModel):
    """Delta of a message; the first has the role."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """Delta of a choice of a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """Event of a streamed ``POST /v1/chat/completions``; the one with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """Response of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    system_fingerprint: str | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None

"""Request bodies: their fields and types.

``SamplingParams`` and the engine check combinations of values.  An unknown field is refused by
name, one without effect is ignored (``HARMLESS``), and one of an unsupported feature is refused
unless its value requests nothing (``ABSENT``).
"""

import reprlib
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field, create_model

import pagedserve.checks as checks
from pagedserve.config.options import options_of
from pagedserve.errors import RequestError
from pagedserve.sampling_params.options import PARAMETERS, SamplingOptions
from pagedserve.server.bounds import MAX_ID_CHARS
from pagedserve.server.fields import (
    Messages,
    NullsLeftOut,
    PredictedContent,
    Prompts,
    ResponseFormat,
    SizedBody,
    StreamOptions,
    TokenIds,
)
from pagedserve.server.tool_fields import AllowedToolChoice, NamedTool, Tool

# Fields of OpenAI and vLLM that have no effect here.
HARMLESS: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "session_id",
        "verbosity",
        "mm_processor_kwargs",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
    }
)

# Fields of features that are not supported, and the values besides None that request nothing.
ABSENT: Final[dict[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "documents": ([],),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "max_tokens_per_doc": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "logprob_token_ids": (),
    "timestamp_granularities[]": (),
    "include[]": (),
    "chunking_strategy": ("auto",),
}

ToolMode: TypeAlias = Literal["none", "auto", "required"]
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Range of priorities and of seeds.
MAX_INT: Final = 2**63 - 1
# Characters of a field's name that an error quotes.
_MAX_NAME_CHARS: Final = 64


class EngineBody(SizedBody):
    """Fields of all requests to the engine.

    Attributes:
        harmless: Further fields of its API that have no effect here.
        absent: Those of features that are not supported; see ``ABSENT``.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    harmless: ClassVar[frozenset[str]] = HARMLESS
    absent: ClassVar[dict[str, tuple[object, ...]]] = ABSENT

    model: str | None = None
    priority: int = Field(default=0, ge=-MAX_INT, le=MAX_INT)
    request_id: str | None = Field(default=None, max_length=MAX_ID_CHARS, pattern="^[ -~]+$")
    timeout: float | None = Field(default=None, gt=0, description="Seconds until it is aborted.")

    def check_fields(self, *, allows_unknown: bool) -> None:
        """Refuse unknown fields, and fields of features that are not supported.

        Args:
            allows_unknown: Pass over unknown ones.

        Raises:
            RequestError: The first of them.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.absent:
                if value is not None and value not in self.absent[name]:
                    raise RequestError(
                        f"{name} is {reprlib.repr(value)}; it is not supported here", param=name
                    )
            elif name not in self.harmless and not allows_unknown:
                shown = name[:_MAX_NAME_CHARS]
                hint = checks.did_you_mean(shown, [*type(self).model_fields, *self.absent])
                raise RequestError(f"{shown} is no field of this request{hint}", param=shown)


class TextBody(EngineBody):
    """Fields of requests with text."""

    truncate_prompt_tokens: int | None = None


# Types of fields that are validated in a single pass, by their plain ones.
_FIELD_TYPES: Final[dict[Any, Any]] = {list[int]: TokenIds}


def _parameter(name: str, **limits: Any) -> Any:
    """A field that is a sampling parameter; None leaves it at its default."""
    return Field(default=None, description=PARAMETERS[name].text, **limits)


if TYPE_CHECKING:
    SamplingBody = TextBody
else:
    # Fields of the sampling parameters that need nothing else of a server.
    SamplingBody = create_model(
        "SamplingBody",
        __base__=TextBody,
        **{
            field.name: (_FIELD_TYPES.get(field.type, field.type) | None, _parameter(field.name))
            for field, known in options_of(SamplingOptions)
            if known.request == "same"
        },
    )


class Body(SamplingBody):
    """Fields of both kinds of completions."""

    n: int | None = _parameter("n", ge=1)
    seed: int | None = _parameter("seed", ge=-MAX_INT, le=MAX_INT)
    max_tokens: int | None = _parameter("max_tokens")
    skip_special_tokens: bool | None = _parameter("skip_special_tokens")
    logit_bias: dict[str, float] | None = _parameter("logit_bias")
    prompt_logprobs: int | None = _parameter("prompt_logprobs")
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    stream_interval: int = Field(default=1, ge=1, description="New tokens of a part of a stream.")
    truncation_side: Literal["left", "right"] = "left"
    response_format: ResponseFormat | None = None
    prediction: PredictedContent | None = _parameter("prediction")
    structured_outputs: dict[str, Any] | None = _parameter("structured_outputs")
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the text includes special tokens."""
        return self.skip_special_tokens is False

    def check_fields(self, *, allows_unknown: bool) -> None:
        """Run the checks of all requests, and refuse fields without those that they require."""
        super().check_fields(allows_unknown=allows_unknown)
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is given without stream; it needs stream true",
                param="stream_options",
            )


class CompletionBody(Body):
    """``POST /v1/completions``."""

    prompt: Prompts
    suffix: str | None = Field(default=None, description="Text after the new text.")
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    may_have_images: ClassVar[bool] = True

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Literal[False] = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolMode | NamedTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool = Field(default=True, description="Whether there may be several.")
    include_reasoning: bool = True
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="A variable of the chat template, which may read it."
    )
    verbosity: str | None = Field(default=None, description="Another such variable.")

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


class InputBody(TextBody):
    """Fields of pooling requests."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    prompt_name: str | None = None


class EmbeddingBody(InputBody):
    """``POST /v1/embeddings``."""

    normalize: bool | None = None


class PoolingBody(InputBody):
    """``POST /pooling``."""

    use_activation: bool | None = None


class ClassificationBody(TextBody):
    """``POST /classify``."""

    input: Prompts
    use_activation: bool | None = None


class ScoreBody(TextBody):
    """``POST /score``."""

    text_1: str | list[str]
    text_2: str | list[str]


class Document(NullsLeftOut):
    """A document to rank."""

    model_config = ConfigDict(extra="ignore")

    text: str


class RerankBody(TextBody):
    """``POST /rerank``, as clients of Jina and Cohere send it."""

    query: str
    documents: list[str | Document]
    top_n: int | None = Field(default=None, ge=0)  # vLLM's default is 0, for all
    return_documents: bool = True


class SpeechBody(EngineBody):
    """``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``, as a form."""

    file: UploadFile
    language: str | None = Field(default=None, description="Spoken language, as a code such as en.")
    prompt: str | None = Field(default=None, description="Previous transcript.")
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: float = 0.0
    seed: int | None = Field(default=None, ge=-MAX_INT, le=MAX_INT)
    stream: bool = False

    def check_fields(self, *, allows_unknown: bool) -> None:
        """Run the checks of all requests, and refuse fields that streams do not support."""
        super().check_fields(allows_unknown=allows_unknown)
        if self.stream and self.response_format == "verbose_json":
            raise RequestError(
                "response_format is 'verbose_json' with stream; it is for whole answers",
                param="response_format",
            )


class TokenizeBody(SizedBody):
    """``POST /tokenize``: a prompt or a conversation."""

    model_config = ConfigDict(extra="forbid")
    may_have_images: ClassVar[bool] = True

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """``POST /detokenize``."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: TokenIds


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorDetail


class AbortBody(BaseModel):
    """``POST /abort_requests``."""

    model_config = ConfigDict(extra="forbid")

    request_ids: list[str]


class LoadLoraBody(BaseModel):
    """``POST /v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1, pattern=r"^[^\x00]+$")
    load_inplace: bool = False


class UnloadLoraBody(BaseModel):
    """``POST /v1/unload_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str
    lora_int_id: int | None = None

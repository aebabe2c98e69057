"""Requests and responses of Ollama's API: their fields and types.

Unknown fields and options are passed over, as Ollama does; those that are known and not supported
are refused by name.
"""

import logging
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from pagedserve.errors import RequestError
from pagedserve.server.chat.protocol import ChosenLogprob
from pagedserve.server.fields import NullsLeftOut, SizedBody
from pagedserve.server.protocol import MAX_INT, OLLAMA_HARMLESS, EngineBody
from pagedserve.server.tools.fields import Function, FunctionTool

logger = logging.getLogger(__name__)

# Options without effect: those of memory and loading, and former ones that today's Ollama ignores.
_WITHOUT_EFFECT: Final = OLLAMA_HARMLESS | {
    *("rope_frequency_base", "rope_frequency_scale"),
    *("mirostat", "mirostat_tau", "mirostat_eta", "tfs_z", "penalize_newline"),
    *("logits_all", "vocab_only", "embedding_only"),
}
# Names of unknown options, each logged once; further ones are not.
_logged: Final[set[str]] = set()
_MAX_LOGGED: Final = 100


def _log_unknown(name: str) -> None:
    name = name[:80]
    if name not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(name)
        logger.warning("the unknown option %r of Ollama's API has no effect", name)


class Options(NullsLeftOut):
    """Sampling parameters; other options have no effect here, and unknown ones are logged."""

    model_config = ConfigDict(extra="allow")

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = Field(default=None, ge=-MAX_INT, le=MAX_INT)
    stop: str | list[str] | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.typical_p not in (None, 1):
            raise RequestError(
                f"options.typical_p is {self.typical_p}; it is not supported here", param="options"
            )
        for name in (self.model_extra or {}).keys() - _WITHOUT_EFFECT:
            _log_unknown(name)
        return self


class _Part(NullsLeftOut):
    """A part of a request."""

    model_config = ConfigDict(extra="ignore")


class CalledFunction(_Part):
    """The function of a tool call, and its arguments."""

    name: str  # the model may have made it up
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(_Part):
    """A tool call of an earlier response."""

    id: str | None = Field(default=None, max_length=256)
    function: CalledFunction


class OllamaMessageParam(_Part):
    """A message of the conversation."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64, to_lower=True)]
    content: str = ""
    thinking: str | None = None
    images: list[str] = Field(default_factory=list)
    tool_calls: list[ToolCall] = Field(default_factory=list, max_length=512)
    tool_name: str | None = None
    tool_call_id: str | None = Field(default=None, max_length=256)


class _Tool(FunctionTool):
    """A tool, whose schema the client in Go sends with empty fields if it has no parameters."""

    @field_validator("function")
    @classmethod
    def _fill_parameters(cls, function: Function) -> Function:
        schema = function.parameters or {}
        for name, empty, meant in (("type", "", "object"), ("properties", None, {})):
            if schema.get(name, meant) == empty:
                schema[name] = meant
        return function


Effort: TypeAlias = Literal["low", "medium", "high", "max"]


class OllamaBody(EngineBody):
    """Fields of both kinds of requests."""

    may_have_images: ClassVar[bool] = True
    absent: ClassVar[dict[str, tuple[object, ...]]] = {}

    model: str = Field(min_length=1)
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: Options = Field(default_factory=Options)
    think: bool | Effort | None = None
    truncate: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0)


class OllamaChatBody(OllamaBody):
    """``POST /api/chat``."""

    may_drop_turns: ClassVar[bool] = True

    messages: list[OllamaMessageParam] = Field(default_factory=list)
    tools: list[_Tool] = Field(default_factory=list)


class GenerateBody(OllamaBody):
    """``POST /api/generate``."""

    absent: ClassVar[dict[str, tuple[object, ...]]] = {
        "template": ("",),
        "context": ([],),
        "suffix": ("",),
        "width": (0,),
        "height": (0,),
        "steps": (0,),
    }

    prompt: str = ""
    system: str = ""
    images: list[str] = Field(default_factory=list)
    raw: bool = False


class _EmbeddingFields(EngineBody):
    """Fields of both kinds of embedding requests."""

    model: str = Field(min_length=1)
    options: Options = Field(default_factory=Options)
    truncate: bool = True
    dimensions: int = Field(default=0, ge=0, description="0 is all of them.")


class EmbedBody(_EmbeddingFields):
    """``POST /api/embed``."""

    input: str | list[str] = ""

    @property
    def texts(self) -> str | list[str]:
        """Texts to embed."""
        return self.input


class PromptEmbeddingBody(_EmbeddingFields):
    """``POST /api/embeddings``."""

    prompt: str = ""

    @property
    def texts(self) -> str:
        """Text to embed."""
        return self.prompt


class ShowBody(SizedBody):
    """``POST /api/show``; Ollama's client always sends all fields, of which only names count."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    name: str | None = Field(default=None, description="Former name of ``model``.")


class OllamaErrorBody(BaseModel):
    """Body of every error response of Ollama's API."""

    error: str


class OllamaFunction(BaseModel):
    """The function of a call of a response, and its arguments.

    The index is that of the call among those of the response.
    """

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(BaseModel):
    """Tool call of a response."""

    id: str
    function: OllamaFunction


class OllamaMessage(BaseModel):
    """Message of the model."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaResponse(BaseModel):
    """Fields of both kinds of responses, and of each line of a stream; the last has the counts.

    Durations are nanoseconds.
    """

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ChosenLogprob] | None = None


class OllamaChat(OllamaResponse):
    """Response of ``POST /api/chat``."""

    message: OllamaMessage


class OllamaText(OllamaResponse):
    """Response of ``POST /api/generate``."""

    response: str
    thinking: str | None = None


class Embeddings(BaseModel):
    """Response of ``POST /api/embed``; durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class PromptEmbedding(BaseModel):
    """Response of ``POST /api/embeddings``."""

    embedding: list[float]


class ModelDetails(BaseModel):
    """Base model of an adapter, empty for the model itself; the other fields are not known."""

    parent_model: str
    format: str = ""
    family: str = ""
    families: list[str] = Field(default_factory=list)
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaCard(BaseModel):
    """A model or adapter; the digest is that of its name, and the size of an adapter is 0."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails


class OllamaModel(OllamaCard):
    """A model or adapter, with the bytes of its files and the time since when it is served."""

    modified_at: str


class RunningModel(OllamaCard):
    """A model or adapter, which is never unloaded, with the bytes of its weights.

    ``size_vram`` are those on a GPU.
    """

    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(BaseModel):
    """Response of ``GET /api/ps``."""

    models: list[RunningModel]


class OllamaModels(BaseModel):
    """Response of ``GET /api/tags``."""

    models: list[OllamaModel]


class OllamaDescription(BaseModel):
    """Response of ``POST /api/show``."""

    details: ModelDetails
    modified_at: str
    template: str
    capabilities: list[str]
    model_info: dict[str, Any]

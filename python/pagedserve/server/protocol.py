"""Bodies of requests: which fields there are, and of which types.

What values mean together is checked by ``SamplingParams`` and the engine.  A field that is unknown
is refused by its name, one that cannot matter is passed over (``HARMLESS``), one of something that
is not here is refused unless its value asks for nothing (``ABSENT``).
"""

import difflib
from typing import Any, Final, Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field

from pagedserve.errors import RequestError
from pagedserve.sampling_params import EarlyStopping
from pagedserve.server.fields import (
    NamedToolChoice,
    NullsLeftOut,
    ResponseFormat,
    StreamOptions,
    Tool,
)

# Fields of OpenAI's and vLLM's that change nothing about an answer here.
HARMLESS: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "session_id",
        "verbosity",
        "mm_processor_kwargs",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
    }
)

# Fields of what is not here, and the values besides None that ask for nothing.
ABSENT: Final[dict[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "suffix": ("",),
    "prompt_embeds": (),
    "documents": ([],),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "max_tokens_per_doc": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "logprob_token_ids": (),
    "timestamp_granularities[]": (),
    "include[]": (),
    "chunking_strategy": ("auto",),
}


# What a request may be named: it is in the log and in every part of a stream.
MAX_ID_CHARS: Final = 256
# Priorities that the scheduler takes, and seeds.
_MAX_INT: Final = 2**63 - 1
# Characters of a field's name that a message repeats.
_MAX_NAME_CHARS: Final = 64


class EngineBody(NullsLeftOut):
    """What all requests to the engine take."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    priority: int = Field(default=0, ge=-_MAX_INT, le=_MAX_INT)
    request_id: str | None = Field(default=None, max_length=MAX_ID_CHARS, pattern="^[ -~]+$")
    timeout: float | None = Field(default=None, gt=0, description="Seconds until it is aborted.")

    def check_fields(self, *, allows_unknown: bool) -> None:
        """Refuse fields that are unknown, or of what is not here.

        Args:
            allows_unknown: Pass over unknown ones.

        Raises:
            RequestError: The first of them.
        """
        for name, value in (self.model_extra or {}).items():
            if name in ABSENT:
                if value is not None and value not in ABSENT[name]:
                    raise RequestError(f"{name} is {value!r}; it is not supported here", param=name)
            elif name not in HARMLESS and not allows_unknown:
                shown = name[:_MAX_NAME_CHARS]
                raise RequestError(
                    f"{shown} is no field of this request{self._nearest(shown)}", param=shown
                )

    def _nearest(self, name: str) -> str:
        known = [*type(self).model_fields, *ABSENT]
        nearest = difflib.get_close_matches(name, known, n=1)
        return f"; did you mean {nearest[0]}?" if nearest else ""


class TextBody(EngineBody):
    """What is asked about texts."""

    truncate_prompt_tokens: int | None = None


class Body(TextBody):
    """What both kinds of completions take."""

    n: int | None = Field(default=None, ge=1)
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=-_MAX_INT, le=_MAX_INT)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    stream_interval: int = Field(default=1, ge=1, description="New tokens of a part of a stream.")
    truncation_side: Literal["left", "right"] = "left"
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None

    @property
    def shows_special_tokens(self) -> bool:
        """Whether texts show special tokens."""
        return self.skip_special_tokens is False

    def check_fields(self, *, allows_unknown: bool) -> None:
        """As of all requests; and refuse fields without what they need."""
        super().check_fields(allows_unknown=allows_unknown)
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is given without stream; it needs stream true",
                param="stream_options",
            )


class CompletionBody(Body):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Literal[False] = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = Field(default=True, description="Whether there may be several.")
    include_reasoning: bool = True

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model may or must call."""
        return [] if self.tool_choice == "none" else self.tools or []


class InputBody(TextBody):
    """What is made into vectors, and how."""

    input: str | list[str] | list[int] | list[list[int]]
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

    input: str | list[str] | list[int] | list[list[int]]
    use_activation: bool | None = None


class ScoreBody(TextBody):
    """``POST /score``."""

    text_1: str | list[str]
    text_2: str | list[str]


class Document(NullsLeftOut):
    """A text to be ranked."""

    model_config = ConfigDict(extra="ignore")

    text: str


class RerankBody(TextBody):
    """``POST /rerank``, as Jina's and Cohere's clients send it."""

    query: str
    documents: list[str | Document]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True


class SpeechBody(EngineBody):
    """``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``, as a form."""

    file: UploadFile
    language: str | None = Field(default=None, description="That is spoken, as a code such as en.")
    prompt: str | None = Field(default=None, description="What was said before.")
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: float = 0.0
    seed: int | None = Field(default=None, ge=-_MAX_INT, le=_MAX_INT)
    stream: bool = False

    def check_fields(self, *, allows_unknown: bool) -> None:
        """As of all requests; and refuse what a stream does not have."""
        super().check_fields(allows_unknown=allows_unknown)
        if self.stream and self.response_format == "verbose_json":
            raise RequestError(
                "response_format is 'verbose_json' with stream; it is for whole answers",
                param="response_format",
            )


class TokenizeBody(NullsLeftOut):
    """``POST /tokenize``: a prompt or a conversation."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
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
    tokens: list[int]


class ErrorDetail(BaseModel):
    """What is said of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The body of every answer that is no answer."""

    error: ErrorDetail


class AbortBody(BaseModel):
    """``POST /abort_requests``."""

    model_config = ConfigDict(extra="forbid")

    request_ids: list[str]


class LoadLoraBody(BaseModel):
    """``POST /v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class UnloadLoraBody(BaseModel):
    """``POST /v1/unload_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str
    lora_int_id: int | None = None

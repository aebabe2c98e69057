"""Fields and types that bodies of requests and responses share.

``SamplingParams`` and the engine check combinations of values.  An unknown field is refused by
name, one without effect is ignored (``HARMLESS``), and one of an unsupported feature is refused
unless its value requests nothing (``ABSENT``).
"""

import reprlib
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model, model_validator

import pagedserve.checks as checks
from pagedserve.config.options import options_of
from pagedserve.errors import RequestError
from pagedserve.sampling_params.options import PARAMETERS, SamplingOptions
from pagedserve.server.fields import (
    Messages,
    OllamaOptions,
    PredictedContent,
    ResponseFormat,
    SizedBody,
    StreamOptions,
    TokenIds,
)
from pagedserve.server.http.bounds import MAX_ID_CHARS
from pagedserve.server.tools.fields import Tool

# Options of Ollama for memory and loading, which have no effect here.
OLLAMA_HARMLESS: Final = frozenset(
    {
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "num_gqa", "main_gpu", "num_thread"),
        *("draft_num_predict", "numa", "low_vram", "f16_kv", "use_mmap", "use_mlock"),
    }
)

# Fields of Anthropic's API that have no effect here; LiteLLM passes them on in chats.
ANTHROPIC_HARMLESS: Final = frozenset(
    {
        *("billing_policy", "cache_control", "diagnostics", "fallbacks", "inference_geo"),
        *("metadata", "safeguards", "service_tier", "speed", "user_profile_id"),
    }
)

# Fields of OpenAI, vLLM, LiteLLM and llama.cpp that have no effect here, and those of other APIs
# that some clients send to any.
HARMLESS: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "usage",  # of OpenRouter, as the next three
        "include",
        "provider",
        "transforms",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "session_id",
        "verbosity",
        "guided_decoding_backend",
        "drop_params",
        "cache_prompt",
        "keep_alive",
        *OLLAMA_HARMLESS,
        *ANTHROPIC_HARMLESS,
    }
)

# Fields of features that are not supported, and the values besides None that request nothing.
ABSENT: Final[dict[str, tuple[object, ...]]] = {
    "functions": ([],),
    "function_call": ("none",),
    "num_beams": (1,),
    "lora_path": (),
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
    "mm_processor_kwargs": ({},),
    "guided_whitespace_pattern": (),
    "reasoning_format": ("auto", "deepseek"),
    "repetition_detection": (),
    "logprob_token_ids": (),
    "do_sample": (True,),
    "strict": (False,),  # of cognee
    "no_stop_trim": (False,),  # of SGLang, as the next three; its router and vLLM's send them
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include[]": (),
    "chunking_strategy": ("auto",),
}


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

    model_config = ConfigDict(extra="allow")

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
            if name == "lora_path" and value == self.model:
                continue  # sglang's load generator names an adapter twice
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


class TemplatedBody(SizedBody):
    """Fields of requests with a conversation, which the chat template renders."""

    may_have_images: ClassVar[bool] = True

    messages: Messages | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None,
        validation_alias=AliasChoices("chat_template_kwargs", "chat_template_args"),
    )

    @property
    def template_fields(self) -> dict[str, Any]:
        """Variables of the chat template that are fields."""
        return {}

    @property
    def usable_tools(self) -> list[Tool]:
        """Tools that the template shows."""
        return []


# Types of fields that are validated in a single pass, by their plain ones.
_FIELD_TYPES: Final[dict[Any, Any]] = {list[int]: TokenIds}
# Names of parameters at llama.cpp and Ollama, and at DashScope and SiliconFlow.
_OTHER_NAMES: Final = {
    "repetition_penalty": "repeat_penalty",
    "thinking_token_budget": "thinking_budget",
}


def _parameter(name: str, **limits: Any) -> Any:
    """A field that is a sampling parameter; None leaves it at its default."""
    if name in _OTHER_NAMES:
        limits["validation_alias"] = AliasChoices(name, _OTHER_NAMES[name])
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
    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Another name of ``max_tokens``, which goes first."
    )
    options: OllamaOptions | None = None
    thinking_token_budget: int | None = _parameter("thinking_token_budget")
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
    vllm_xargs: dict[str, Any] | None = _parameter("extra_args")
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None

    @model_validator(mode="after")
    def _take_max_tokens(self) -> Self:
        """Take from its other names what ``max_tokens`` does not set."""
        limit = None if self.options is None else self.options.num_predict
        if self.max_tokens is None:
            self.max_tokens = self.max_new_tokens or (limit if limit and limit > 0 else None)
        return self

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


class CachedTokens(BaseModel):
    """Tokens of prompts that were in the prefix cache."""

    cached_tokens: int


class PredictedTokens(BaseModel):
    """Tokens of a prediction that the text has, and those that it has not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageInfo(BaseModel):
    """Tokens of a request and its response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: PredictedTokens | None = None


class PromptLogprob(BaseModel):
    """Log-probability of a token of the vocabulary in the place of a prompt's token."""

    logprob: float
    rank: int
    decoded_token: str | None


# Of each token of a prompt, by id; null for the first.
PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorDetail

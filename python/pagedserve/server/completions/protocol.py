"""Request and response of a completion."""

from typing import Literal

from pydantic import BaseModel, Field

from pagedserve.server.fields import Prompts
from pagedserve.server.protocol import Body, PromptLogprobs, UsageInfo


class CompletionBody(Body):
    """``POST /v1/completions``."""

    prompt: Prompts
    suffix: str | None = Field(default=None, description="Text after the new text.")
    logprobs: int | None = None
    add_special_tokens: bool = True


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a choice's tokens; those of a prompt's first token are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChunkChoice(BaseModel):
    """Delta of a choice of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionChunkChoice):
    """Choice of a completion."""

    finish_reason: Literal["stop", "length", "abort"]


class CompletionChunk(BaseModel):
    """Event of a streamed ``POST /v1/completions``; the one with the usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | None = None


class Completion(BaseModel):
    """Response of ``POST /v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo
    system_fingerprint: str | None

"""Requests and responses of tokenization."""

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from pagedserve.server.fields import NullsLeftOut, TokenIds
from pagedserve.server.protocol import TemplatedBody
from pagedserve.server.tools.fields import Tool


class TokenizeBody(TemplatedBody):
    """``POST /tokenize``: a prompt or a conversation."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = Field(
        default=None,
        validation_alias=AliasChoices("prompt", "content"),  # the second is llama.cpp's
    )
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: list[Tool] | None = None

    @property
    def usable_tools(self) -> list[Tool]:
        """Tools that the template shows."""
        return self.tools or []


class DetokenizeBody(NullsLeftOut):
    """``POST /detokenize``."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: TokenIds


class Tokens(BaseModel):
    """Response of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    """Response of ``GET /tokenizer_info``; further fields are the texts of named tokens."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    model_max_length: int
    added_tokens_decoder: dict[int, str]
    chat_template: str | None


class DecodedText(BaseModel):
    """Response of ``POST /detokenize``."""

    prompt: str

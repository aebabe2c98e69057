"""Requests and responses of the routes of models and adapters."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class LoadLoraBody(BaseModel):
    """``POST /v1/load_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1, pattern=r"^[^\x00]+$")
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadLoraBody(BaseModel):
    """``POST /v1/unload_lora_adapter``."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str
    lora_int_id: int | None = None


class ModelCard(BaseModel):
    """A model or adapter, as OpenAI's and Anthropic's clients read it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["pagedserve"] = "pagedserve"
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Any] = []
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"


class ModelList(BaseModel):
    """Response of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str

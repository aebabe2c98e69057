"""Requests and responses of the routes of state, and of those for the operator."""

from pydantic import BaseModel, ConfigDict


class AbortBody(BaseModel):
    """``POST /abort_requests``."""

    model_config = ConfigDict(extra="forbid")

    request_ids: list[str]


class Health(BaseModel):
    """Response of ``GET /health``."""

    status: str


class Version(BaseModel):
    """Response of ``GET /version``."""

    version: str


class Load(BaseModel):
    """Response of ``GET /load``: running and waiting sequences."""

    server_load: int


class ServerInfo(BaseModel):
    """Response of ``GET /server_info``."""

    version: str
    models: list[str]
    backends: str


class PrefixCacheReset(BaseModel):
    """Response of ``POST /reset_prefix_cache``: whether prefixes were dropped."""

    reset: bool


class AbortedRequests(BaseModel):
    """Response of ``POST /abort_requests``: the ids of responses that ended."""

    aborted: list[str]

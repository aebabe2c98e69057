"""Requests and responses of ``/v1/batches``."""

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pagedserve.errors import RequestError
from pagedserve.server.fields import Metadata, NullsLeftOut
from pagedserve.server.files.protocol import ExpiresAfter
from pagedserve.server.files.records import Record

Status: TypeAlias = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
# Ends of a batch.
End: TypeAlias = Literal["completed", "failed", "expired", "cancelled"]

_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
_SECONDS = {"h": 3600, "d": 86400}


def window_seconds(window: str) -> int:
    """Seconds of a completion window, hours or days as in 24h or 7d.

    Raises:
        RequestError: Another form.
    """
    found = _WINDOW.fullmatch(window)
    if found is None:
        message = f"completion_window is {window!r:.100}; it must be hours or days, as in 24h or 7d"
        raise RequestError(message, param="completion_window")
    return int(found[1]) * _SECONDS[found[2]]


def _window(given: str) -> str:
    window_seconds(given)
    return given


class BatchBody(NullsLeftOut):
    """``POST /v1/batches``."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, AfterValidator(_window)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class RequestCounts(BaseModel):
    """Number of requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(BaseModel):
    """Why a batch has failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(BaseModel):
    """List of errors."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchObject(Record):
    """A batch; times are Unix seconds, None until they have come."""

    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = Field(default_factory=RequestCounts)
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it has its last status."""
        return self.status in {"completed", "failed", "expired", "cancelled"}


class BatchList(BaseModel):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool

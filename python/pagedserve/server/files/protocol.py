"""Requests and responses of ``/v1/files``."""

from typing import Annotated, Literal, TypeAlias

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field

from pagedserve.server.fields import NullsLeftOut
from pagedserve.server.files.records import Record

# Seconds from the creation of a file to its deletion, as at OpenAI: an hour to 30 days.
_Lifetime: TypeAlias = Annotated[int, Field(ge=3600, le=30 * 86400)]


class ExpiresAfter(NullsLeftOut):
    """When files are deleted."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: _Lifetime


class FileBody(BaseModel):
    """``POST /v1/files``, as a form."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(default=None, alias="expires_after[anchor]")
    lifetime: _Lifetime | None = Field(default=None, alias="expires_after[seconds]")


class FileObject(Record):
    """A file; it is deleted at ``expires_at``, Unix seconds, if that is not None."""

    object: Literal["file"] = "file"
    bytes: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """Confirmation of a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True

"""Requests and responses of ``/v1/files``."""

from typing import Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict

from pagedserve.server.files.records import Record


class FileBody(BaseModel):
    """``POST /v1/files``, as a form."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile
    purpose: Literal["batch"]


class FileObject(Record):
    """A file."""

    object: Literal["file"] = "file"
    bytes: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


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

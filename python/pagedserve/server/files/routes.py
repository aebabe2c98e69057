"""Routes of ``/v1/files``."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Depends, FastAPI, Form, Query, Request
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from pagedserve.server.files.protocol import DeletedFile, FileBody, FileList, FileObject
from pagedserve.server.files.records import Page
from pagedserve.server.files.store import FileStore
from pagedserve.server.http.routing import FORM, json_responses

_FileForm: TypeAlias = Annotated[FileBody, Form(media_type="multipart/form-data")]
_MAX_LIMIT = 10_000


class _Content(FileResponse):
    """The content of a file; a client that does not read it is disconnected."""

    def __init__(self, path: Path, stall_timeout: float) -> None:
        super().__init__(path, media_type="application/octet-stream")
        self._stall_timeout = stall_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, each part within the time limit."""

        async def send_part(message: Message) -> None:
            await asyncio.wait_for(send(message), self._stall_timeout)

        with suppress(TimeoutError):
            await super().__call__(scope, receive, send_part)


def add_files(
    app: FastAPI,
    store: FileStore,
    check_unused: Callable[[FileObject], None],
    *,
    stall_timeout: float,
) -> None:
    """Add the routes of files.

    Args:
        app: Application.
        store: The files.
        check_unused: Raises ``ServerError`` if a file is in use, and must not be deleted.
        stall_timeout: Seconds without a read after which a client is disconnected.
    """

    async def drop_expired() -> None:
        store.drop_expired(check_unused)

    unexpired = [Depends(drop_expired)]

    @app.post("/v1/files", dependencies=[*FORM, *unexpired])
    async def create_file(body: _FileForm, request: Request) -> FileObject:
        """Store a file, the input of a batch."""
        request.scope["arriving"].release()
        return await store.upload(
            request.scope["owner"],
            body.file.file,
            num_bytes=body.file.size or 0,
            filename=body.file.filename or "file",
            lifetime=body.lifetime,
        )

    @app.get("/v1/files", responses=json_responses(FileList), dependencies=unexpired)
    async def list_files(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_LIMIT)] = _MAX_LIMIT,
        order: Literal["asc", "desc"] = "desc",
    ) -> Any:
        """List the files of an API key."""
        return store.page(request.scope["owner"], Page(after, limit, order), purpose)

    @app.get("/v1/files/{file_id}", dependencies=unexpired)
    async def retrieve_file(file_id: str, request: Request) -> FileObject:
        """Return what is known of a file."""
        return store.records.get(request.scope["owner"], file_id, param="file_id")

    @app.get("/v1/files/{file_id}/content", response_class=FileResponse, dependencies=unexpired)
    async def file_content(file_id: str, request: Request) -> FileResponse:
        """Return the content of a file."""
        file = store.records.get(request.scope["owner"], file_id, param="file_id")
        return _Content(store.path(file.id), stall_timeout)

    @app.delete("/v1/files/{file_id}", dependencies=unexpired)
    async def delete_file(file_id: str, request: Request) -> DeletedFile:
        """Delete a file."""
        file = store.records.get(request.scope["owner"], file_id, param="file_id")
        check_unused(file)
        store.delete(file)
        return DeletedFile(id=file_id)

"""Routes of ``/v1/files``."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import FastAPI, Form, Query, Request
from starlette.responses import FileResponse

from pagedserve.server.files.objects import DeletedFile, FileBody, FileList, FileObject
from pagedserve.server.files.records import Page
from pagedserve.server.files.store import FileStore
from pagedserve.server.routing import FORM

_FileForm: TypeAlias = Annotated[FileBody, Form(media_type="multipart/form-data")]
_MAX_LIMIT = 10_000


def add_files(app: FastAPI, store: FileStore, check_unused: Callable[[FileObject], None]) -> None:
    """Add the routes of files.

    Args:
        app: Application.
        store: The files.
        check_unused: Raises ``ServerError`` if a file is in use, and must not be deleted.
    """

    @app.post("/v1/files", dependencies=FORM)
    async def create_file(body: _FileForm, request: Request) -> FileObject:
        """Store a file, the input of a batch."""
        request.scope["arriving"].release()
        return await store.upload(
            request.scope["owner"],
            body.file.file,
            num_bytes=body.file.size or 0,
            filename=body.file.filename or "file",
        )

    @app.get("/v1/files", responses={200: {"model": FileList}})
    async def list_files(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_LIMIT)] = _MAX_LIMIT,
        order: Literal["asc", "desc"] = "desc",
    ) -> Any:
        """List the files of an API key."""
        return store.page(request.scope["owner"], Page(after, limit, order), purpose)

    @app.get("/v1/files/{file_id}")
    async def retrieve_file(file_id: str, request: Request) -> FileObject:
        """Return what is known of a file."""
        return store.records.get(request.scope["owner"], file_id, param="file_id")

    @app.get("/v1/files/{file_id}/content", response_class=FileResponse)
    async def file_content(file_id: str, request: Request) -> FileResponse:
        """Return the content of a file."""
        file = store.records.get(request.scope["owner"], file_id, param="file_id")
        return FileResponse(store.path(file.id), media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> DeletedFile:
        """Delete a file."""
        file = store.records.get(request.scope["owner"], file_id, param="file_id")
        check_unused(file)
        store.delete(file)
        return DeletedFile(id=file_id)

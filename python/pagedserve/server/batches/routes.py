"""Routes of ``/v1/batches``."""

from typing import Annotated, Any, Final

from fastapi import FastAPI, Query, Request

from pagedserve.server.batches.protocol import BatchBody, BatchList, BatchObject
from pagedserve.server.batches.service import BatchService
from pagedserve.server.files.records import Page
from pagedserve.server.files.routes import add_files
from pagedserve.server.http.routing import JSON, add_absent, json_responses

_PATHS: Final = ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")


def add_batches(app: FastAPI, service: BatchService | None, *, stall_timeout: float) -> None:
    """Add the routes of batches and of their files; those of None name the option.

    Args:
        app: Application.
        service: The batches; None for none.
        stall_timeout: Seconds without a read after which a client is disconnected.
    """
    if service is None:
        text = "files and batches are off; --batch-directory DIRECTORY turns them on"
        for path in _PATHS:
            add_absent(app, path, 404, text)
        return
    add_files(app, service.files, service.check_unused, stall_timeout=stall_timeout)

    @app.post("/v1/batches", dependencies=JSON)
    async def create_batch(body: BatchBody, request: Request) -> BatchObject:
        """Answer the requests of a file."""
        return service.create(request.scope["owner"], body)

    @app.get("/v1/batches", responses=json_responses(BatchList))
    async def list_batches(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Any:
        """List the batches of an API key, the newest first."""
        return service.records.page(request.scope["owner"], Page(after, limit, "desc"))

    @app.get("/v1/batches/{batch_id}")
    async def retrieve_batch(batch_id: str, request: Request) -> BatchObject:
        """Return the state of a batch."""
        return service.records.get(request.scope["owner"], batch_id, param="batch_id")

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> BatchObject:
        """Cancel a batch, which keeps the responses that it has."""
        return service.cancel(request.scope["owner"], batch_id)

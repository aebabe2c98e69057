"""Routes of the Responses API."""

import json
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from pagedserve.server.context import Context
from pagedserve.server.http.errors import ServerError
from pagedserve.server.http.routing import JSON, job_response, json_responses, streaming_responses
from pagedserve.server.responses.api import ROOT
from pagedserve.server.responses.items import ITEMS, Item
from pagedserve.server.responses.job import num_input_tokens, responses_job
from pagedserve.server.responses.protocol import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseEvent,
    ResponseObject,
    ResponsesBody,
)
from pagedserve.server.responses.store import Key

_WHOLE: Final = json_responses(ResponseObject)


def add_responses(app: FastAPI, context: Context) -> None:
    """Add the routes of the Responses API."""
    _add_stored(app, context)
    responses = streaming_responses(ResponseObject, ResponseEvent)

    @app.post(ROOT, responses=responses, dependencies=JSON)
    async def create_response(body: ResponsesBody, request: Request) -> Any:
        """Generate a response."""
        return job_response(await responses_job(context, body, request.scope["owner"]), request)

    @app.post(f"{ROOT}/input_tokens", dependencies=JSON)
    async def count_input_tokens(body: ResponsesBody, request: Request) -> InputTokens:
        """Count the tokens of the input of a response, with what it continues."""
        num_tokens = await num_input_tokens(context, body, request.scope["owner"])
        return InputTokens(input_tokens=num_tokens)


def _add_stored(app: FastAPI, context: Context) -> None:
    store = context.responses

    @app.get(f"{ROOT}/{{response_id}}", responses=_WHOLE)
    async def retrieve_response(response_id: str, request: Request, *, stream: bool = False) -> Any:
        """Return a stored response, or one in progress as it is now."""
        if stream:
            text = "stream is True; a stored response is returned whole"
            raise ServerError(400, text, param="stream")
        key = request.scope["owner"], response_id
        if key in store.running:
            return _json(store.running[key]())
        return Response(store.get(key).response, media_type="application/json")

    @app.delete(f"{ROOT}/{{response_id}}")
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Delete a stored response."""
        key = request.scope["owner"], response_id
        if key in store.running:
            raise ServerError(400, "the response is in progress; cancel it first")
        store.delete(key)
        return DeletedResponse(id=response_id)

    @app.post(f"{ROOT}/{{response_id}}/cancel", responses=_WHOLE)
    async def cancel_response(response_id: str, request: Request) -> Any:
        """End a response in progress; its request is answered with what it has."""
        return await _cancel(context, (request.scope["owner"], response_id))

    @app.get(f"{ROOT}/{{response_id}}/input_items", responses=json_responses(ItemList))
    async def list_input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Any:
        """List the items that a response was made from, earlier ones of its conversation too."""
        key = request.scope["owner"], response_id
        *earlier, last = store.conversation(key, named_by="response_id")
        items = [item for stored in earlier for item in stored.turn()] + last.input()
        return _page(items if order == "asc" else items[::-1], after, limit)


async def _cancel(context: Context, key: Key) -> Response:
    """Abort a response in progress; return it as it is now."""
    if (shown := context.responses.running.get(key)) is None:
        status = json.loads(context.responses.get(key).response)["status"]
        raise ServerError(400, f"the response is {status}; only one in progress is cancelled")
    for running in list(context.jobs.values()):
        if running.answer_id == key[1]:
            await context.abort(running)
    return _json(shown() | {"status": "cancelled"})


def _json(shown: object) -> Response:
    """JSON response, of any Unicode."""
    return Response(json.dumps(shown), media_type="application/json")


def _page(items: list[Item], after: str | None, limit: int) -> Response:
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise ServerError(400, f"after is {after!r:.300}, which is no item", param="after")
    start = 0 if after is None else ids.index(after) + 1
    shown = items[start : start + limit]
    return _json(
        {
            "object": "list",
            "data": ITEMS.dump_python(shown, exclude_none=True),
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": start + limit < len(items),
        }
    )

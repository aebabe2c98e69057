"""Routes of the server."""

import asyncio
import json
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pagedserve._core import __version__
from pagedserve.errors import PagedServeError
from pagedserve.server.admin.routes import add_admin, add_state
from pagedserve.server.batches.routes import add_batches
from pagedserve.server.batches.service import BatchService
from pagedserve.server.chat.protocol import ChatCompletionChunk
from pagedserve.server.chat.routes import add_chat
from pagedserve.server.completions.protocol import CompletionChunk
from pagedserve.server.completions.routes import add_completions
from pagedserve.server.context import Context
from pagedserve.server.decisions.routes import add_decisions
from pagedserve.server.http.apis import error_response
from pagedserve.server.http.body import json_route
from pagedserve.server.http.errors import ServerError, reported
from pagedserve.server.http.gate import Gate
from pagedserve.server.http.routing import add_absent, error_responses, with_events
from pagedserve.server.messages import api as messages_api
from pagedserve.server.messages.protocol import MessageEvent
from pagedserve.server.messages.routes import add_messages
from pagedserve.server.models.routes import add_adapters, add_models
from pagedserve.server.ollama import api as ollama_api
from pagedserve.server.ollama.routes import add_ollama
from pagedserve.server.options import ServerArgs
from pagedserve.server.pooling.routes import add_pooling
from pagedserve.server.protocol import ErrorBody
from pagedserve.server.responses import api as responses_api
from pagedserve.server.responses.protocol import ResponseEvent
from pagedserve.server.responses.routes import add_responses
from pagedserve.server.speech.protocol import TranscriptChunk, TranscriptEvent
from pagedserve.server.speech.routes import add_speech
from pagedserve.server.tokens.routes import add_tokens

# Functions that add the routes of every server, and those that need --enable-admin-routes.
_ROUTES: Final = (
    *(add_completions, add_chat, add_messages, add_responses, add_decisions, add_ollama),
    *(add_pooling, add_speech, add_tokens, add_models, add_state),
)
_FOR_OPERATORS: Final = (add_admin, add_adapters)

# Models of the events of streams.
_EVENTS: Final = (
    CompletionChunk,
    ChatCompletionChunk,
    MessageEvent,
    ResponseEvent,
    TranscriptEvent,
    TranscriptChunk,
)

# Routes of OpenAI's and vLLM's servers that this one lacks.
ABSENT_PATHS: Final = (
    "/v1/responses/compact",
    "/v1/audio/speech",
    "/v1/images/{rest:path}",
    "/v1/moderations",
)


def build_app(context: Context, batches: BatchService | None = None) -> ASGIApp:
    """Build the ASGI application; ``batches`` None serves no files and batches."""
    app = FastAPI(
        title="pagedserve",
        version=__version__,
        root_path=context.args.root_path,
        servers=[{"url": root}] if (root := context.args.root_path) else None,
        openapi_url=None,  # see _add_schema
        docs_url=None,  # this page and the next load scripts from other sites
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        responses=error_responses(ErrorBody),
    )
    app.router.route_class = json_route(context)
    for kind in (ServerError, PagedServeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _tell)
    for add in _ROUTES:
        add(app, context)
    _add_for_operators(app, context)
    add_batches(app, batches, stall_timeout=context.args.stall_timeout)
    for path in ABSENT_PATHS:
        name = path.removeprefix("/v1/").partition("/{")[0]
        add_absent(app, path, 501, f"{name} is not supported here")
    _add_schema(app)
    apis = {
        messages_api.ROOT: messages_api.MESSAGES,
        responses_api.ROOT: responses_api.RESPONSES,
        ollama_api.ROOT: ollama_api.OLLAMA,
    }
    return _for_pages(Gate(app, context, apis), context.args)


def _for_pages(app: ASGIApp, args: ServerArgs) -> ASGIApp:
    """Add CORS for the allowed origins."""
    if not args.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=args.allowed_origins,
        allow_credentials=args.allow_credentials,
        allow_methods=args.allowed_methods or ("*",),
        allow_headers=args.allowed_headers or ("*",),
    )


async def _tell(request: Request, error: Exception) -> Response:
    return error_response(reported(error), request.scope)


def _add_for_operators(app: FastAPI, context: Context) -> None:
    """Add the routes for operators; where they are off, their paths answer what turns them on."""
    is_on = context.args.enable_admin_routes
    operators = app if is_on else FastAPI(openapi_url=None)
    for add in _FOR_OPERATORS:
        add(operators, context)
    if not is_on:
        for path in [route.path for route in operators.routes if isinstance(route, Route)]:
            add_absent(app, path, 404, f"{path} is off; --enable-admin-routes turns it on")


def _add_schema(app: FastAPI) -> None:
    """Describe the other routes, once, when that is requested: it takes 0.25 s of Python."""

    @cache
    def schema() -> Future[bytes]:
        builder = ThreadPoolExecutor(1, thread_name_prefix="pagedserve-openapi")
        built = builder.submit(lambda: json.dumps(with_events(app.openapi(), _EVENTS)).encode())
        builder.shutdown(wait=False)
        return built

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        content = await asyncio.to_thread(schema().result)  # which no client that leaves cancels
        return Response(content, media_type="application/json")

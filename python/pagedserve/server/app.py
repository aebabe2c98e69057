"""Routes of the server."""

import asyncio
import json
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Final, TypeAlias

from fastapi import FastAPI, Form, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from pagedserve._core import __version__
from pagedserve.errors import PagedServeError, RequestError
from pagedserve.server.apis import error_response
from pagedserve.server.batches.routes import add_batches
from pagedserve.server.batches.service import BatchService
from pagedserve.server.body import json_route
from pagedserve.server.chat import chat_job
from pagedserve.server.completions import completion_job
from pagedserve.server.context import Context
from pagedserve.server.decisions.routes import add_decisions
from pagedserve.server.errors import ServerError, reported
from pagedserve.server.gate import Gate
from pagedserve.server.messages import api as messages_api
from pagedserve.server.messages.routes import add_messages
from pagedserve.server.ollama import api as ollama_api
from pagedserve.server.ollama.routes import add_ollama
from pagedserve.server.options import LoraModule, ServerArgs
from pagedserve.server.pooling import (
    classification_job,
    embedding_job,
    pooling_job,
    rerank_job,
    score_job,
)
from pagedserve.server.protocol import (
    AbortBody,
    ChatBody,
    ClassificationBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ErrorBody,
    LoadLoraBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    SpeechBody,
    TokenizeBody,
    UnloadLoraBody,
)
from pagedserve.server.responses import api as responses_api
from pagedserve.server.responses.routes import add_responses
from pagedserve.server.routing import FORM, JSON, STREAMED, add_absent, answer_id, job_response
from pagedserve.server.speech import speech_job

# Routes of OpenAI's and vLLM's servers that this one lacks.
ABSENT_PATHS: Final = (
    "/v1/responses/compact",
    "/v1/audio/speech",
    "/v1/images/{rest:path}",
    "/v1/moderations",
)

_ADMIN_PATHS: Final = (
    "/reset_prefix_cache",
    "/abort_requests",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)

# Further content types of a transcript, besides JSON.
_WRITTEN: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/event-stream": {}, "text/plain": {}}}
}


_SpeechForm: TypeAlias = Annotated[SpeechBody, Form(media_type="multipart/form-data")]


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
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.router.route_class = json_route(context)
    for kind in (ServerError, PagedServeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _tell)
    _add_completions(app, context)
    add_messages(app, context)
    add_responses(app, context)
    add_decisions(app, context)
    add_ollama(app, context)
    add_batches(app, batches, stall_timeout=context.args.stall_timeout)
    _add_pooling(app, context)
    _add_speech(app, context)
    _add_absent(app, context)
    _add_tokens(app, context)
    _add_state(app, context)
    if context.args.enable_admin_routes:
        _add_admin(app, context)
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


def _add_completions(app: FastAPI, context: Context) -> None:
    @app.post("/v1/completions", responses=STREAMED, dependencies=JSON)
    async def completions(body: CompletionBody, request: Request) -> Any:
        """Complete prompts."""
        named = answer_id("cmpl-", request, body.request_id)
        return job_response(await completion_job(context, body, named), request)

    @app.post("/v1/chat/completions", responses=STREAMED, dependencies=JSON)
    async def chat_completions(body: ChatBody, request: Request) -> Any:
        """Generate the next message of a conversation."""
        named = answer_id("chatcmpl-", request, body.request_id)
        return job_response(await chat_job(context, body, named), request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model under all its names, and its adapters."""
        await context.check_ready()
        names = [*context.names, *context.adapters.names]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return {"object": "list", "data": [_card(context, name) for name in names], **pages}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return the model or an adapter by name."""
        return _card(context, context.model_name(name))


def _add_pooling(app: FastAPI, context: Context) -> None:
    @app.post("/v1/embeddings", dependencies=JSON)
    async def embeddings(body: EmbeddingBody, request: Request) -> Any:
        """Compute an embedding of each prompt."""
        named = answer_id("embd-", request, body.request_id)
        return job_response(await embedding_job(context, body, named), request)

    @app.post("/pooling", dependencies=JSON)
    async def pooling(body: PoolingBody, request: Request) -> Any:
        """Compute the pooled output of each prompt."""
        named = answer_id("pool-", request, body.request_id)
        return job_response(await pooling_job(context, body, named), request)

    @app.post("/classify", dependencies=JSON)
    async def classify(body: ClassificationBody, request: Request) -> Any:
        """Compute the class probabilities of each prompt."""
        named = answer_id("classify-", request, body.request_id)
        return job_response(await classification_job(context, body, named), request)

    @app.post("/score", dependencies=JSON)
    @app.post("/v1/score", dependencies=JSON, include_in_schema=False)
    async def score(body: ScoreBody, request: Request) -> Any:
        """Score the similarity of texts."""
        named = answer_id("score-", request, body.request_id)
        return job_response(await score_job(context, body, named), request)

    @app.post("/rerank", dependencies=JSON)
    @app.post("/v1/rerank", dependencies=JSON, include_in_schema=False)
    @app.post("/v2/rerank", dependencies=JSON, include_in_schema=False)
    async def rerank(body: RerankBody, request: Request) -> Any:
        """Rank documents by their relevance to a query."""
        named = answer_id("rerank-", request, body.request_id)
        return job_response(await rerank_job(context, body, named), request)


def _add_speech(app: FastAPI, context: Context) -> None:
    @app.post("/v1/audio/transcriptions", responses=_WRITTEN, dependencies=FORM)
    async def transcriptions(body: _SpeechForm, request: Request) -> Any:
        """Transcribe speech."""
        request.scope["arriving"].release()
        named = answer_id("trsc-", request, body.request_id)
        return job_response(await speech_job(context, body, named, "transcribe"), request)

    @app.post("/v1/audio/translations", responses=_WRITTEN, dependencies=FORM)
    async def translations(body: _SpeechForm, request: Request) -> Any:
        """Translate speech to English text."""
        request.scope["arriving"].release()
        named = answer_id("trsl-", request, body.request_id)
        return job_response(await speech_job(context, body, named, "translate"), request)


def _card(context: Context, name: str) -> dict[str, Any]:
    """A model as OpenAI's and Anthropic's clients read it."""
    adapter = context.adapters.get(name)
    base = context.names[0]
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "pagedserve",
        "root": base if adapter is None else name,  # never a path
        "parent": None if adapter is None else adapter.base_model_name or base,
        "max_model_len": context.text.max_model_len,
        "permission": [],
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(context.created, UTC),
        "lifecycle": "active",
    }


def _add_absent(app: FastAPI, context: Context) -> None:
    for path in ABSENT_PATHS:
        name = path.removeprefix("/v1/").partition("/{")[0]
        add_absent(app, path, 501, f"{name} is not supported here")
    if not context.args.enable_admin_routes:
        for path in _ADMIN_PATHS:
            add_absent(app, path, 404, f"{path} is off; --enable-admin-routes turns it on")


def _add_tokens(app: FastAPI, context: Context) -> None:
    @app.post("/tokenize", dependencies=JSON)
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Tokenize a prompt or conversation."""
        await context.check_ready()
        context.model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ServerError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            tokens = await context.text.chat_token_ids(body)
        else:
            special = body.add_special_tokens is not False
            tokens = await context.text.encode(body.prompt or "", add_special_tokens=special)
        answer = {
            "count": len(tokens),
            "max_model_len": context.text.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = await context.text.token_strings(tokens)
        return answer

    @app.post("/detokenize", dependencies=JSON)
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """Decode tokens to text."""
        await context.check_ready()
        context.model_name(body.model)
        return {"prompt": await context.text.decode(body.tokens)}


def _add_state(app: FastAPI, context: Context) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return 200 while requests are accepted and steps complete; else 503 with the reason."""
        await context.check_ready()
        await context.client.check_health()
        return {"status": "ok"}

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # as /health
    async def ping() -> dict[str, str]:
        return await health()

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the server's version."""
        return {"version": __version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of running and waiting sequences."""
        return {"server_load": context.admission.num_seqs}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Return the configuration of the server and the engine."""
        await context.check_ready()
        model = await context.client.get_model_config()
        names = [*context.names, *context.adapters.names]
        return {"version": __version__, "models": names, "backends": model.backends}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return all metrics in Prometheus' format."""
        text = await context.metrics.exposition()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse((files("pagedserve.server") / "page.html").read_text("utf-8"))


def _add_schema(app: FastAPI) -> None:
    """Describe the other routes, once, when that is requested: it takes 0.25 s of Python."""

    @cache
    def schema() -> Future[bytes]:
        builder = ThreadPoolExecutor(1, thread_name_prefix="pagedserve-openapi")
        built = builder.submit(lambda: json.dumps(app.openapi()).encode())
        builder.shutdown(wait=False)
        return built

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        content = await asyncio.to_thread(schema().result)  # which no client that leaves cancels
        return Response(content, media_type="application/json")


def _add_admin(app: FastAPI, context: Context) -> None:
    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, bool]:
        """Drop every cached prefix, unless a request runs."""
        await context.check_ready()
        return {"reset": await context.client.reset_prefix_cache()}

    @app.post("/abort_requests", dependencies=JSON)
    async def abort_requests(body: AbortBody) -> dict[str, list[str]]:
        """Abort requests by their response ids."""
        jobs = list(context.jobs.values())
        found = [running for running in jobs if running.answer_id in body.request_ids]
        for running in found:
            await context.abort(running)
        return {"aborted": sorted({running.answer_id for running in found})}

    @app.post("/v1/load_lora_adapter", dependencies=JSON)
    async def load_lora_adapter(body: LoadLoraBody) -> PlainTextResponse:
        """Load an adapter and serve it under its name."""
        await context.check_ready()
        module = LoraModule(body.lora_name, body.lora_path)
        try:
            await context.adapters.load(module, load_inplace=body.load_inplace)
        except RequestError as error:  # its message names the field that holds the path
            named, colon, said = str(error).partition(": ")
            text = said.replace(repr(body.lora_path), "lora_path")
            raise ServerError(400, f"{named}{colon}{text}", param="lora_path") from error
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        return PlainTextResponse(text)

    @app.post("/v1/unload_lora_adapter", dependencies=JSON)
    async def unload_lora_adapter(body: UnloadLoraBody) -> PlainTextResponse:
        """Stop serving an adapter; running requests keep it until they end."""
        await context.check_ready()
        await context.adapters.unload(body.lora_name, body.lora_int_id)
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return PlainTextResponse(text)

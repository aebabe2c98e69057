"""Routes of Ollama's API."""

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

from fastapi import FastAPI, Request

from pagedserve.inputs.images import ImageRules
from pagedserve.server.admin.protocol import Version
from pagedserve.server.context import Context
from pagedserve.server.http.errors import ServerError
from pagedserve.server.http.routing import (
    JSON,
    answer_id,
    error_responses,
    job_response,
    json_responses,
    streaming_responses,
)
from pagedserve.server.ollama.api import ROOT, VERSION
from pagedserve.server.ollama.embedding import embed_job
from pagedserve.server.ollama.job import chat_job, generate_job, stamp
from pagedserve.server.ollama.protocol import (
    EmbedBody,
    Embeddings,
    GenerateBody,
    ModelDetails,
    OllamaChat,
    OllamaChatBody,
    OllamaDescription,
    OllamaErrorBody,
    OllamaModel,
    OllamaModels,
    OllamaText,
    PromptEmbedding,
    PromptEmbeddingBody,
    RunningModel,
    RunningModels,
    ShowBody,
)

_ERRORS: Final = error_responses(OllamaErrorBody)
_LINES: Final = "application/x-ndjson"
# When the model is unloaded; clients show "Forever" for a time this far ahead.
_NEVER: Final = "2200-01-01T00:00:00Z"
# Routes that manage models.
_ABSENT: Final = ("pull", "push", "create", "copy", "delete", "blobs/{digest}")


def add_ollama(app: FastAPI, context: Context) -> None:
    """Add the routes to an application."""
    chat = streaming_responses(OllamaChat, OllamaChat, OllamaErrorBody, media_type=_LINES)

    @app.post(f"{ROOT}/chat", responses=_ERRORS | chat, dependencies=JSON)
    async def ollama_chat(body: OllamaChatBody, request: Request) -> Any:
        """Generate the next message of a conversation, in Ollama's format."""
        if not body.messages:
            message = {"role": "assistant", "content": ""}
            return await _loaded(context, body.model, message=message)
        named = answer_id("chat-", request, body.request_id)
        return job_response(await chat_job(context, body, named), request)

    text = streaming_responses(OllamaText, OllamaText, OllamaErrorBody, media_type=_LINES)

    @app.post(f"{ROOT}/generate", responses=_ERRORS | text, dependencies=JSON)
    async def ollama_generate(body: GenerateBody, request: Request) -> Any:
        """Answer a prompt, in Ollama's format."""
        if not body.prompt:
            return await _loaded(context, body.model, response="")
        named = answer_id("gen-", request, body.request_id)
        return job_response(await generate_job(context, body, named), request)

    _add_embeddings(app, context)
    _add_models(app, context)

    for name in _ABSENT:

        @app.api_route(
            f"{ROOT}/{name}",
            methods=["GET", "POST", "DELETE"],
            responses=_ERRORS,
            include_in_schema=False,
        )
        async def absent(request: Request) -> None:
            name = request.scope["route"].path.partition("/{")[0].removeprefix("/")
            raise ServerError(501, f"{name} is not supported here")


def _add_embeddings(app: FastAPI, context: Context) -> None:
    """Add the routes of embeddings."""

    @app.post(f"{ROOT}/embed", responses=_ERRORS | json_responses(Embeddings), dependencies=JSON)
    async def ollama_embed(body: EmbedBody, request: Request) -> Any:
        """Compute an embedding of each text, in Ollama's format."""
        if not body.input:
            await context.check_ready()
            return {"model": context.model_name(body.model), "embeddings": []}
        named = answer_id("embd-", request, body.request_id)
        return job_response(await embed_job(context, body, named), request)

    single = json_responses(PromptEmbedding)

    @app.post(f"{ROOT}/embeddings", responses=_ERRORS | single, dependencies=JSON)
    async def ollama_embeddings(body: PromptEmbeddingBody, request: Request) -> Any:
        """Compute the embedding of a text, in Ollama's former format."""
        if not body.prompt:
            await context.check_ready()
            context.model_name(body.model)
            return {"embedding": []}
        named = answer_id("embd-", request, body.request_id)
        return job_response(await embed_job(context, body, named), request)


def _add_models(app: FastAPI, context: Context) -> None:
    """Add the routes that describe the model and the server."""

    @app.get(f"{ROOT}/tags", responses=_ERRORS)
    async def ollama_tags() -> OllamaModels:
        """List the model under all its names, and its adapters, in Ollama's format."""
        await context.check_ready()
        created = _created(context)
        num_bytes = (await context.client.get_model_config()).file_bytes
        return OllamaModels(
            models=[
                OllamaModel(**_card(context, name, num_bytes), modified_at=created)
                for name in context.all_names
            ]
        )

    @app.get(f"{ROOT}/ps", responses=_ERRORS)
    async def ollama_ps() -> RunningModels:
        """List the same as those in memory, in Ollama's format."""
        await context.check_ready()
        model = await context.client.get_model_config()
        cards = [_card(context, name, model.weight_bytes) for name in context.all_names]
        return RunningModels(
            models=[
                RunningModel(
                    **card,
                    expires_at=_NEVER,
                    size_vram=card["size"] if model.device_type == "cuda" else 0,
                    context_length=model.max_model_len,
                )
                for card in cards
            ]
        )

    @app.post(f"{ROOT}/show", responses=_ERRORS, dependencies=JSON)
    async def ollama_show(body: ShowBody) -> OllamaDescription:
        """Describe the model, in Ollama's format."""
        await context.check_ready()
        return await _description(context, context.model_name(body.model or body.name))

    @app.get(f"{ROOT}/version", responses=_ERRORS)
    async def ollama_version() -> Version:
        """Return the version of Ollama that has this API."""
        return Version(version=VERSION)


async def _loaded(context: Context, model: str, **fields: Any) -> dict[str, Any]:
    """Response of a request without a prompt, by which clients load a model."""
    await context.check_ready()
    name = context.model_name(model)
    done = {"done": True, "done_reason": "load"}
    return {"model": name, "created_at": stamp(), **fields, **done}


def _card(context: Context, name: str, num_bytes: int) -> dict[str, Any]:
    """Fields of a name in lists; ``num_bytes`` is the size of the model itself."""
    digest = sha256(name.encode()).hexdigest()
    size = num_bytes if context.adapters.get(name) is None else 0
    details = _details(context, name)
    return {"name": name, "model": name, "digest": digest, "size": size, "details": details}


def _details(context: Context, name: str) -> ModelDetails:
    parent = "" if context.adapters.get(name) is None else context.names[0]
    return ModelDetails(parent_model=parent)


def _created(context: Context) -> str:
    return datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")


async def _description(context: Context, name: str) -> OllamaDescription:
    model = await context.client.get_model_config()
    text = context.text
    has_images = isinstance(model.images, ImageRules)
    capabilities = {
        "completion": model.pooling is None,
        "embedding": model.pooling is not None and model.pooling.classes is None,
        "tools": model.pooling is None and text.reads_tool_calls,
        "vision": has_images,
        "thinking": context.args.reasoning_parser is not None,
    }
    return OllamaDescription(
        template=text.shown_template,
        capabilities=[name for name, has in capabilities.items() if has],
        model_info={
            "general.architecture": "pagedserve",
            "general.basename": name,
            "pagedserve.context_length": model.max_model_len,
            "pagedserve.vocab_size": model.vocab_size,
        },
        details=_details(context, name),
        modified_at=_created(context),
    )

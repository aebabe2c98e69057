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
    streaming_responses,
)
from pagedserve.server.ollama.api import ROOT, VERSION
from pagedserve.server.ollama.job import chat_job, generate_job, model_name, stamp
from pagedserve.server.ollama.protocol import (
    GenerateBody,
    LoadedOllamaModel,
    LoadedOllamaModels,
    ModelDetails,
    OllamaChat,
    OllamaChatBody,
    OllamaDescription,
    OllamaErrorBody,
    OllamaModel,
    OllamaModels,
    OllamaText,
    ShowBody,
)

_ERRORS: Final = error_responses(OllamaErrorBody)
# When a model that stays loaded is unloaded.
_NEVER: Final = "9999-12-31T23:59:59Z"
_LINES: Final = "application/x-ndjson"
# Routes that manage models or compute embeddings.
_ABSENT: Final = (
    *("pull", "push", "create", "copy", "delete", "embed", "embeddings"),
    "blobs/{digest}",
)


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

    _add_models(app, context)

    @app.get(f"{ROOT}/version", responses=_ERRORS)
    async def ollama_version() -> Version:
        """Return the version of Ollama that has this API."""
        return Version(version=VERSION)

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


def _add_models(app: FastAPI, context: Context) -> None:
    """Add the routes that list or describe the model."""

    @app.get(f"{ROOT}/tags", responses=_ERRORS)
    async def ollama_tags() -> OllamaModels:
        """List the model under all its names, and its adapters, in Ollama's format."""
        await context.check_ready()
        num_bytes = (await context.client.get_model_config()).file_bytes
        return OllamaModels(
            models=[OllamaModel(**_card(context, name, num_bytes)) for name in context.all_names]
        )

    @app.get(f"{ROOT}/ps", responses=_ERRORS)
    async def ollama_ps() -> LoadedOllamaModels:
        """List the loaded model under all its names, and its adapters, in Ollama's format."""
        await context.check_ready()
        model = await context.client.get_model_config()
        cards = [_card(context, name, model.weight_bytes) for name in context.all_names]
        return LoadedOllamaModels(
            models=[
                LoadedOllamaModel(
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
        return await _description(context, model_name(context, body.model or body.name))


async def _loaded(context: Context, model: str, **fields: Any) -> dict[str, Any]:
    """Response of a request without a prompt, by which clients load a model."""
    await context.check_ready()
    name = model_name(context, model)
    done = {"done": True, "done_reason": "load"}
    return {"model": name, "created_at": stamp(), **fields, **done}


def _card(context: Context, name: str, num_bytes: int) -> dict[str, Any]:
    """Fields of a listed name; ``num_bytes`` is the size of the model itself."""
    digest = sha256(name.encode()).hexdigest()
    size = num_bytes if context.adapters.get(name) is None else 0
    return {"name": name, "model": name, "digest": digest, "size": size, **_common(context, name)}


def _common(context: Context, name: str) -> dict[str, Any]:
    """Fields shared by the lists and ``/api/show``."""
    created = datetime.fromtimestamp(context.created, UTC).isoformat().replace("+00:00", "Z")
    parent = "" if context.adapters.get(name) is None else context.names[0]
    return {"modified_at": created, "details": ModelDetails(parent_model=parent)}


async def _description(context: Context, name: str) -> OllamaDescription:
    model = await context.client.get_model_config()
    text = context.text
    has_images = isinstance(model.images, ImageRules)
    capabilities = {
        "completion": model.pooling is None,
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
        **_common(context, name),
    )

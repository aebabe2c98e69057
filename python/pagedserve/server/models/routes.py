"""Routes of models and adapters."""

from datetime import UTC, datetime

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from pagedserve.errors import RequestError
from pagedserve.server.context import Context
from pagedserve.server.http.errors import ServerError
from pagedserve.server.http.routing import JSON, TEXT
from pagedserve.server.models.protocol import LoadLoraBody, ModelCard, ModelList, UnloadLoraBody
from pagedserve.server.options import LoraModule


def add_models(app: FastAPI, context: Context) -> None:
    """Add the routes that every server has to an application."""

    @app.get("/v1/models")
    async def models() -> ModelList:
        """List the model under all its names, and its adapters."""
        await context.check_ready()
        names = context.all_names
        cards = [_card(context, name) for name in names]
        return ModelList(data=cards, first_id=names[0], last_id=names[-1])

    @app.get("/v1/models/", include_in_schema=False)  # else a model with an empty name
    async def slashed(request: Request) -> Response:
        return RedirectResponse(request.url_for("models"))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        """Return the model or an adapter by name."""
        return _card(context, context.model_name(name))


def _card(context: Context, name: str) -> ModelCard:
    adapter = context.adapters.get(name)
    base = context.names[0]
    return ModelCard(
        id=name,
        created=context.created,
        root=(context.root or base) if adapter is None else name,  # never a path
        parent=None if adapter is None else adapter.base_model_name or base,
        max_model_len=context.text.max_model_len,
        display_name=name,
        created_at=datetime.fromtimestamp(context.created, UTC),
    )


def add_adapters(app: FastAPI, context: Context) -> None:
    """Add the routes for the operator to an application."""

    @app.post("/v1/load_lora_adapter", dependencies=JSON, responses=TEXT, response_class=Response)
    async def load_lora_adapter(body: LoadLoraBody) -> PlainTextResponse:
        """Load an adapter and serve it under its name."""
        await context.check_ready()
        module = LoraModule(body.lora_name, body.lora_path, body.base_model_name or None)
        try:
            await context.adapters.load(module, load_inplace=body.load_inplace)
        except RequestError as error:  # its message names the field that holds the path
            named, colon, said = str(error).partition(": ")
            text = said.replace(repr(body.lora_path), "lora_path")
            raise ServerError(400, f"{named}{colon}{text}", param="lora_path") from error
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        return PlainTextResponse(text)

    @app.post("/v1/unload_lora_adapter", dependencies=JSON, responses=TEXT, response_class=Response)
    async def unload_lora_adapter(body: UnloadLoraBody) -> PlainTextResponse:
        """Stop serving an adapter; running requests keep it until they end."""
        await context.check_ready()
        await context.adapters.unload(body.lora_name, body.lora_int_id)
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return PlainTextResponse(text)

"""Routes of the server's state, and those for its operator."""

from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

from pagedserve.server.admin.protocol import (
    AbortBody,
    AbortedRequests,
    Health,
    Load,
    PrefixCacheReset,
    ServerInfo,
    Version,
)
from pagedserve.server.context import Context
from pagedserve.server.http.routing import JSON, TEXT


def add_state(app: FastAPI, context: Context) -> None:
    """Add the routes that every server has to an application."""

    @app.get("/health")
    async def health() -> Health:
        """Return 200 while requests are accepted and steps complete; else 503 with the reason."""
        await context.check_ready()
        await context.client.check_health()
        return Health(status="ok")

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # as /health
    async def ping() -> Health:
        return await health()

    @app.get("/version")
    async def version() -> Version:
        """Return the server's version."""
        return Version(version=app.version)

    @app.get("/load")
    async def load() -> Load:
        """Return the number of running and waiting sequences."""
        return Load(server_load=context.admission.num_seqs)

    @app.get("/server_info")
    async def server_info() -> ServerInfo:
        """Return the configuration of the server and the engine."""
        await context.check_ready()
        model = await context.client.get_model_config()
        names = context.all_names
        return ServerInfo(version=app.version, models=names, backends=model.backends)

    @app.get("/metrics", responses=TEXT, response_class=Response)
    async def metrics() -> Response:
        """Return all metrics in Prometheus' format."""
        text = await context.metrics.exposition()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse((files("pagedserve.server") / "page.html").read_text("utf-8"))


def add_admin(app: FastAPI, context: Context) -> None:
    """Add the routes for the operator to an application."""

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> PrefixCacheReset:
        """Drop every cached prefix, unless a request runs."""
        await context.check_ready()
        return PrefixCacheReset(reset=await context.client.reset_prefix_cache())

    @app.post("/abort_requests", dependencies=JSON)
    async def abort_requests(body: AbortBody) -> AbortedRequests:
        """Abort requests by their response ids."""
        jobs = list(context.jobs.values())
        found = [running for running in jobs if running.answer_id in body.request_ids]
        for running in found:
            await context.abort(running)
        return AbortedRequests(aborted=sorted({running.answer_id for running in found}))

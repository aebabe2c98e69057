"""Route of completions."""

from typing import Any

from fastapi import FastAPI, Request

from pagedserve.server.completions.job import completion_job
from pagedserve.server.completions.protocol import Completion, CompletionBody
from pagedserve.server.context import Context
from pagedserve.server.http.routing import JSON, answer_id, job_response, streaming_responses


def add_completions(app: FastAPI, context: Context) -> None:
    """Add the route to an application."""

    @app.post("/v1/completions", responses=streaming_responses(Completion), dependencies=JSON)
    async def completions(body: CompletionBody, request: Request) -> Any:
        """Complete prompts."""
        named = answer_id("cmpl-", request, body.request_id)
        return job_response(await completion_job(context, body, named), request)

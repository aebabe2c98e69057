"""Route of completions."""

from typing import Any

from fastapi import FastAPI, Request

from pagedserve.server.completions.job import completion_job
from pagedserve.server.completions.protocol import Completion, CompletionBody, CompletionChunk
from pagedserve.server.context import Context
from pagedserve.server.http.routing import JSON, answer_id, job_response, streaming_responses
from pagedserve.server.protocol import ErrorBody


def add_completions(app: FastAPI, context: Context) -> None:
    """Add the route to an application."""
    responses = streaming_responses(Completion, CompletionChunk, ErrorBody)

    @app.post("/v1/completions", responses=responses, dependencies=JSON)
    async def completions(body: CompletionBody, request: Request) -> Any:
        """Complete prompts."""
        named = answer_id("cmpl-", request, body.request_id)
        return job_response(await completion_job(context, body, named), request)

"""Route of chat completions."""

from typing import Any

from fastapi import FastAPI, Request

from pagedserve.server.chat.job import chat_job
from pagedserve.server.chat.protocol import ChatBody, ChatCompletion, ChatCompletionChunk
from pagedserve.server.context import Context
from pagedserve.server.http.routing import JSON, answer_id, job_response, streaming_responses
from pagedserve.server.protocol import ErrorBody


def add_chat(app: FastAPI, context: Context) -> None:
    """Add the route to an application."""
    responses = streaming_responses(ChatCompletion, ChatCompletionChunk, ErrorBody)

    @app.post("/v1/chat/completions", responses=responses, dependencies=JSON)
    async def chat_completions(body: ChatBody, request: Request) -> Any:
        """Generate the next message of a conversation."""
        named = answer_id("chatcmpl-", request, body.request_id)
        return job_response(await chat_job(context, body, named), request)

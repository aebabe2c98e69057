"""Routes of the Messages API."""

from typing import Any, Final

from fastapi import FastAPI, Request

from pagedserve.server.context import Context
from pagedserve.server.http.routing import (
    JSON,
    answer_id,
    error_responses,
    job_response,
    streaming_responses,
)
from pagedserve.server.messages.api import ROOT
from pagedserve.server.messages.job import message_job, num_tokens
from pagedserve.server.messages.protocol import (
    CountTokensBody,
    Message,
    MessageEvent,
    MessagesBody,
    MessagesErrorBody,
    TokenCount,
)

_ERRORS: Final = error_responses(MessagesErrorBody)


def add_messages(app: FastAPI, context: Context) -> None:
    """Add the routes to an application."""
    responses = _ERRORS | streaming_responses(Message, MessageEvent)

    @app.post(ROOT, responses=responses, dependencies=JSON)
    async def messages(body: MessagesBody, request: Request) -> Any:
        """Generate the next message of a conversation, in Anthropic's format."""
        named = answer_id("msg_", request, body.request_id)
        return job_response(await message_job(context, body, named), request)

    @app.post(f"{ROOT}/count_tokens", responses=_ERRORS, dependencies=JSON)
    async def count_tokens(body: CountTokensBody) -> TokenCount:
        """Count the tokens of a conversation, in Anthropic's format."""
        return TokenCount(input_tokens=await num_tokens(context, body))

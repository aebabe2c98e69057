"""Routes of tokenization."""

from fastapi import FastAPI

from pagedserve.server.context import Context
from pagedserve.server.fields import check_conversation
from pagedserve.server.http.errors import ServerError
from pagedserve.server.http.routing import JSON
from pagedserve.server.tokens.protocol import (
    DecodedText,
    DetokenizeBody,
    TokenizeBody,
    TokenizerInfo,
    Tokens,
)
from pagedserve.server.tools.fields import check_names, check_usable


def add_tokens(app: FastAPI, context: Context) -> None:
    """Add the routes to an application."""

    @app.post("/tokenize", dependencies=JSON, response_model_exclude_none=True)
    async def tokenize(body: TokenizeBody) -> Tokens:
        """Tokenize a prompt or conversation."""
        await context.check_ready()
        context.model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ServerError(400, "give either prompt or messages", param="prompt")
        if body.prompt is not None and body.tools is not None:
            raise ServerError(400, "tools is given with prompt; it needs messages", param="tools")
        if body.messages is not None and body.add_special_tokens:
            raise ServerError(
                400,
                "add_special_tokens is True with messages; it must be False or left out: the chat "
                "template has the special tokens",
                param="add_special_tokens",
            )
        if body.messages is not None:
            check_conversation(body.messages)
            check_names(body.usable_tools)
            check_usable(body.usable_tools)
            tokens = await context.text.chat_token_ids(body)
        else:
            special = body.add_special_tokens is not False
            tokens = await context.text.encode(body.prompt or "", add_special_tokens=special)
        strings = await context.text.token_strings(tokens) if body.return_token_strs else None
        return Tokens(
            count=len(tokens),
            max_model_len=context.text.max_model_len,
            tokens=tokens,
            token_strs=strings,
        )

    @app.post("/detokenize", dependencies=JSON)
    async def detokenize(body: DetokenizeBody) -> DecodedText:
        """Decode tokens to text."""
        await context.check_ready()
        context.model_name(body.model)
        return DecodedText(prompt=await context.text.decode(body.tokens))

    @app.get("/tokenizer_info", response_model_exclude_none=True)
    async def tokenizer_info() -> TokenizerInfo:
        """Return the special tokens and the chat template."""
        await context.check_ready()
        return context.text.tokenizer_info

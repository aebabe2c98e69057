"""JSON bodies, parsed and validated.

Bounds of the whole body are checked before it is parsed, those of fields before a model is created
from it, and the response reports the first error.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from pagedserve.errors import RequestError
from pagedserve.server.context import Context
from pagedserve.server.fields import SizedBody
from pagedserve.server.http.bounds import (
    CHARS_PER_TOKEN,
    MAX_DEPTH,
    MAX_FORM_BYTES,
    MAX_FORM_FIELDS,
    MAX_FORM_FILES,
    MODEL_LENGTH,
    SMALL_BODY_BYTES,
    VOCABULARY,
    check_bounds,
    check_texts,
)
from pagedserve.server.http.errors import ServerError, problems
from pagedserve.server.http.json_document import parsed
from pagedserve.server.http.unparsed import check_unparsed


def json_route(context: Context) -> type[APIRoute]:
    """Create the class of routes that read JSON bodies within their bounds."""

    class JsonRoute(APIRoute):
        """A route whose body is read by ``read_body``."""

        def get_route_handler(self) -> Callable[[Request], Any]:
            """Create the handler of a request."""
            handle = super().get_route_handler()
            kind = get_type_hints(self.endpoint).get("body")
            if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
                return handle

            async def handle_json(request: Request) -> Response:
                given = _JsonRequest(request.scope, request.receive)
                given.context, given.kind = context, kind
                response: Response = await handle(given)
                return response

            return handle_json

    return JsonRoute


class _JsonRequest(Request):
    """A request whose body is parsed to a pydantic model.

    Attributes:
        context: Context of the server.
        kind: Type of the body.
    """

    context: Context
    kind: type[BaseModel]

    async def json(self) -> BaseModel:
        """Parse the body; small ones in the event loop.

        Raises:
            ServerError: 400, the body is invalid.
        """
        content = await self.body()
        context = self.context
        read = partial(
            read_body,
            content,
            self.kind,
            sizes_of(context),
            allows_unknown=context.args.allow_unknown_fields,
        )
        try:
            return await context.for_body(read, num_bytes=len(content))
        except RequestError as error:  # FastAPI would drop its message
            raise ServerError(400, str(error), param=error.param) from error
        finally:
            self.scope["arriving"].release()

    def form(self, **given: Any) -> Any:
        """Parse a form with this server's limits instead of Starlette's."""
        del given
        return super().form(
            max_files=MAX_FORM_FILES, max_fields=MAX_FORM_FIELDS, max_part_size=MAX_FORM_BYTES
        )


def sizes_of(context: Context) -> dict[str, int]:
    """Sizes of the model that bound fields; none while it is loading."""
    text = context.text
    if not text.max_model_len:  # the route responds that the model is loading
        return {}
    return {MODEL_LENGTH: text.max_model_len, VOCABULARY: text.vocab_size}


def read_body(
    content: bytes,
    kind: type[BaseModel],
    sizes: Mapping[str, int],
    *,
    allows_unknown: bool = False,
) -> BaseModel:
    """Parse and validate a body.

    Args:
        content: Bytes of the body.
        kind: Type of the body.
        sizes: As in ``check_bounds``.
        allows_unknown: Pass over unknown fields of objects that have none.

    Raises:
        RequestError: The first bound that is exceeded.
        ServerError: 400, a field is invalid. json.JSONDecodeError: It is not valid JSON.
    """
    num_tokens = sizes.get(MODEL_LENGTH)
    if len(content) > SMALL_BODY_BYTES or content.count(b"[") + content.count(b"{") > MAX_DEPTH:
        has_images = issubclass(kind, SizedBody) and kind.may_have_images
        check_unparsed(content, num_tokens, has_images=has_images)
    given = parsed(content)
    return validated(given, kind, sizes, num_bytes=len(content), allows_unknown=allows_unknown)


def validated(
    given: object,
    kind: type[BaseModel],
    sizes: Mapping[str, int],
    *,
    num_bytes: int,
    allows_unknown: bool = False,
) -> BaseModel:
    """Validate a parsed body of ``num_bytes`` bytes; see ``read_body``."""
    num_tokens = sizes.get(MODEL_LENGTH)
    if isinstance(given, dict):
        check_bounds(given, sizes)
        is_whole = not (issubclass(kind, SizedBody) and kind.may_drop_turns)
        if num_tokens is not None and num_bytes > CHARS_PER_TOKEN * num_tokens and is_whole:
            check_texts(given, CHARS_PER_TOKEN * num_tokens)
    try:
        body = kind.model_validate(given, context=allows_unknown)
    except ValidationError as error:
        found = error.errors(include_url=False)
        cause = found[0].get("ctx", {}).get("error")
        if isinstance(cause, RequestError):
            raise cause from error
        message, param = problems(found)
        raise ServerError(400, message, param=param) from error
    if isinstance(body, SizedBody):
        body.arrived_with(num_bytes)
    return body

"""What routes share: checks of content types, ids of responses, and responses of jobs."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Final, TypeAlias

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from pagedserve.engine.stats import request_time
from pagedserve.server.http.answer import Answer
from pagedserve.server.http.errors import ServerError
from pagedserve.server.http.load_report import FORMAT_HEADER, load_report
from pagedserve.server.http.request_log import log_request, span_attributes
from pagedserve.server.job import Job

Responses: TypeAlias = dict[int | str, dict[str, Any]]

# Prefix of references to schemas in an OpenAPI document.
_SCHEMAS: Final = "#/components/schemas/"

# OpenAPI of a route that answers in plain text, and with errors in JSON: its `response_class` is
# `Response`, which has no content type.
TEXT: Final[Responses] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def json_responses(answer: type[BaseModel]) -> Responses:
    """OpenAPI of a route whose responses are JSON of this form."""
    return {200: {"model": answer}}


def streaming_responses(
    answer: type[BaseModel],
    *parts: type[BaseModel],
    media_type: str = "text/event-stream",
    may_be_text: bool = False,
) -> Responses:
    """OpenAPI of a route whose responses are JSON of a form, or streams.

    Args:
        answer: The form.
        parts: What each event's data may be, see ``with_events``, or each line.
        media_type: Content type of the streams.
        may_be_text: Whether responses may also be plain text.
    """
    schema = {"anyOf": [{"$ref": f"{_SCHEMAS}{part.__name__}"} for part in parts]}
    text = TEXT[200]["content"] if may_be_text else {}
    return {200: {"model": answer, "content": {media_type: {"schema": schema}, **text}}}


def with_events(document: dict[str, Any], events: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """Return an OpenAPI document with the schemas of events in its components."""
    _, found = models_json_schema(
        [(event, "serialization") for event in events], ref_template=f"{_SCHEMAS}{{model}}"
    )
    schemas = found["$defs"] | document["components"]["schemas"]
    return document | {"components": document["components"] | {"schemas": schemas}}


def error_responses(body: type[BaseModel]) -> Responses:
    """OpenAPI of the errors of an API, which have this form."""
    return {"4XX": {"model": body}, "5XX": {"model": body}}


async def _check_json(request: Request) -> None:
    """Refuse a body without a JSON Content-Type: it would not be parsed as JSON."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        said = f"the Content-Type is {given!r}" if given else "there is no Content-Type"
        raise ServerError(415, f"{said}; it must be application/json")


async def _check_form(request: Request) -> None:
    """Refuse a body without the Content-Type of a form with files."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "multipart/form-data":
        said = f"the Content-Type is {given!r}" if given else "there is no Content-Type"
        raise ServerError(415, f"{said}; it must be multipart/form-data")


# Dependencies of routes with JSON bodies, and with forms.
JSON: Final = [Depends(_check_json)]
FORM: Final = [Depends(_check_form)]


def answer_id(prefix: str, request: Request, named: str | None) -> str:
    """Id of a response: of the body, else of the request."""
    return f"{prefix}{named or request.scope['request_id']}"


def job_response(job: Job, request: Request) -> Response:
    """Response of a job, which is logged and traced at its end."""
    context, report_format = job.context, request.headers.get(FORMAT_HEADER)
    return Answer(
        job.answer(),
        streams=job.streams,
        media_type=job.media_type,
        stall_timeout=context.args.stall_timeout,
        keep_alive_interval=context.args.sse_keep_alive_interval,
        headers=partial(load_report, report_format, context.client.snapshot),
        failure=job.failure,
        on_end=partial(_request_ended, job, request),
    )


def _request_ended(job: Job, request: Request, error: ServerError | None) -> None:
    request.scope["is_logged"] = True
    if job.context.args.enable_log_requests:
        log_request(job, error)
    if job.context.tracer is not None:
        seconds = request_time() - job.arrival_time
        job.context.tracer.request_ended(
            span_attributes(job, seconds), seconds, headers=request.headers, error=error
        )


def add_absent(app: FastAPI, path: str, status: int, message: str) -> None:
    """Add a route that this server does not answer; the message says why."""

    @app.api_route(path, methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def absent() -> None:
        raise ServerError(status, message)

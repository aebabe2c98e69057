"""Routes of speech."""

from typing import Annotated, Any, Final, TypeAlias

from fastapi import FastAPI, Form, Request

from pagedserve.server.context import Context
from pagedserve.server.http.routing import FORM, answer_id, job_response, streaming_responses
from pagedserve.server.protocol import ErrorBody
from pagedserve.server.speech.job import speech_job
from pagedserve.server.speech.protocol import (
    SpeechBody,
    Transcript,
    TranscriptChunk,
    TranscriptEvent,
)

_SpeechForm: TypeAlias = Annotated[SpeechBody, Form(media_type="multipart/form-data")]

_TRANSCRIPT: Final = streaming_responses(
    Transcript, TranscriptEvent, TranscriptChunk, ErrorBody, may_be_text=True
)


def add_speech(app: FastAPI, context: Context) -> None:
    """Add the routes to an application."""

    @app.post("/v1/audio/transcriptions", responses=_TRANSCRIPT, dependencies=FORM)
    async def transcriptions(body: _SpeechForm, request: Request) -> Any:
        """Transcribe speech."""
        request.scope["arriving"].release()
        named = answer_id("trsc-", request, body.request_id)
        return job_response(await speech_job(context, body, named, "transcribe"), request)

    @app.post("/v1/audio/translations", responses=_TRANSCRIPT, dependencies=FORM)
    async def translations(body: _SpeechForm, request: Request) -> Any:
        """Translate speech to English text."""
        request.scope["arriving"].release()
        named = answer_id("trsl-", request, body.request_id)
        return job_response(await speech_job(context, body, named, "translate"), request)

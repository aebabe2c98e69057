"""Request and response of the speech routes."""

from typing import Annotated, Literal

from fastapi import UploadFile
from pydantic import BaseModel, Field, RootModel

from pagedserve.errors import RequestError
from pagedserve.server.protocol import MAX_INT, EngineBody, UsageInfo


class SpeechBody(EngineBody):
    """``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``, as a form."""

    file: UploadFile
    language: str | None = Field(default=None, description="Spoken language, as a code such as en.")
    prompt: str | None = Field(default=None, description="Previous transcript.")
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    timestamp_granularities: list[Literal["segment", "word"]] = Field(
        default=["segment"],
        alias="timestamp_granularities[]",
        description="What has timestamps: segment; word is passed over beside it.",
    )
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = Field(default=None, ge=-MAX_INT, le=MAX_INT)
    stream: bool = False
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Maximum new tokens of each part of long audio."
    )
    stream_include_usage: bool = Field(
        default=False, description="Stream chunks as vLLM does, and the usage at the end."
    )
    stream_continuous_usage_stats: bool = Field(
        default=False, description="The usage is in every chunk, with stream_include_usage."
    )

    def check_fields(self, *, allows_unknown: bool) -> None:
        """Run the checks of all requests, and refuse fields that streams do not support."""
        super().check_fields(allows_unknown=allows_unknown)
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                raise RequestError(
                    f"{name} is given without stream; it needs stream true", param=name
                )
        if "segment" not in self.timestamp_granularities:
            raise RequestError(
                f"timestamp_granularities[] is {self.timestamp_granularities}; words have no "
                "timestamps here, 'segment' is accepted",
                param="timestamp_granularities[]",
            )
        if self.stream and self.wants_timestamps:
            raise RequestError(
                f"response_format is {self.response_format!r} with stream; it is for whole answers",
                param="response_format",
            )

    @property
    def wants_timestamps(self) -> bool:
        """Whether the response has segments with their times."""
        return self.response_format in ("verbose_json", "srt", "vtt")


class SpeechUsage(BaseModel):
    """Seconds of the audio."""

    type: Literal["duration"]
    seconds: float


class TranscriptTokens(BaseModel):
    """Tokens of a streamed transcript."""

    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ChunkDelta(BaseModel):
    """The next part of the text."""

    content: str


class ChunkChoice(BaseModel):
    """The only choice of a chunk."""

    delta: ChunkDelta


class TranscriptDelta(BaseModel):
    """The next part of the text, also where readers of vLLM's chunks look for it."""

    type: Literal["transcript.text.delta"]
    delta: str
    choices: list[ChunkChoice]


class TranscriptDone(BaseModel):
    """The whole text."""

    type: Literal["transcript.text.done"]
    text: str
    usage: TranscriptTokens


class TranscriptEvent(
    RootModel[Annotated[TranscriptDelta | TranscriptDone, Field(discriminator="type")]]
):
    """Event of a streamed transcript."""


class TranscriptChunk(BaseModel):
    """Event of a streamed transcript with ``stream_include_usage``; the last has no choice."""

    id: str
    object: Literal["transcription.chunk", "translation.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageInfo | None = None


class TranscriptSegment(BaseModel):
    """Part of the text, between two times in seconds from the start of the audio.

    ``avg_logprob`` is the mean over the tokens of its part of the audio, which begins at ``seek``
    hundredths of a second, and has no speech by ``no_speech_prob``.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Transcript(BaseModel):
    """Text of the speech; the last four fields are those of ``verbose_json``."""

    text: str
    usage: SpeechUsage
    task: Literal["transcribe", "translate"] | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[TranscriptSegment] | None = None

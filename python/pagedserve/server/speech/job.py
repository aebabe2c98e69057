"""Speech routes: ``/v1/audio/transcriptions`` and ``/v1/audio/translations``.

A file is decoded after admission, one file at a time.  Audio that is longer than the model's input
is cut where it is quiet; the chunks are prompts that run concurrently, and their texts are joined.
"""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from math import exp, inf
from typing import Any, Final

from pagedserve.engine.lanes import SMALL_COST
from pagedserve.inputs import Prompt, TokensPrompt
from pagedserve.inputs.audio import Audio, audio_of_file
from pagedserve.inputs.speech import RequestedSpeech, SpeechRules, SpeechTask
from pagedserve.inputs.timestamps import TimeTokens
from pagedserve.outputs import CompletionOutput, RequestOutput
from pagedserve.sampling_params import RequestOutputKind, SamplingParams
from pagedserve.server.context import Context
from pagedserve.server.http.errors import ServerError
from pagedserve.server.job import TokenJob
from pagedserve.server.speech.protocol import SpeechBody, TranscriptSegment
from pagedserve.server.speech.segments import SUBTITLES, compression_ratio

# Approximate number of special tokens in a decoder prompt.
_NUM_BEGINNING: Final = 4


@dataclass(slots=True, kw_only=True)
class SpeechJob(TokenJob):
    """A transcription or translation of an audio file.

    Attributes:
        rules: Speech tokens of the model.
        task: "transcribe" or "translate".
        durations: Seconds of each prompt's audio.
        times: Tokens of the transcript's timestamps; None without them.
    """

    body: SpeechBody
    rules: SpeechRules
    task: SpeechTask
    durations: Sequence[float]
    times: TimeTokens | None

    @property
    def streams(self) -> bool:
        """Whether its response is a stream."""
        return self.body.stream

    @property
    def media_type(self) -> str:
        """Content type of a whole response."""
        is_json = self.body.response_format in ("json", "verbose_json")
        return "application/json" if is_json else "text/plain; charset=utf-8"

    @property
    def prompt_field(self) -> str:
        """Name of the field with the prompts."""
        return "file"

    @property
    def asked(self) -> object:
        """Input of the client, for the log."""
        return {"file": self.body.file.filename, "prompt": self.body.prompt}

    def answer(self) -> AsyncGenerator[bytes, None]:
        """Chunks of its response, one unless it streams."""
        if not self.body.stream:
            return self._whole()
        return self._chunks() if self.body.stream_include_usage else self._events()

    async def _whole(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.outputs()) as outputs:
            async for _, output in outputs:
                _check_whole(output)
        last = [self.last[place] for place in range(self.num_prompts)]
        segments = None if self.times is None else await self._segments(last, self.times)
        texts = (output.outputs[0] for output in last) if segments is None else segments
        yield self._shown("".join(part.text for part in texts).strip(), last[0], segments).encode()

    def _shown(
        self, text: str, first: RequestOutput, segments: list[TranscriptSegment] | None
    ) -> str:
        """The response; ``first`` is the output of the first prompt."""
        form = self.body.response_format
        if form == "text":
            return f"{text}\n"
        if form in SUBTITLES:
            return SUBTITLES[form](segments or [])
        seconds = round(sum(self.durations), 3)
        shown: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": seconds}}
        if form == "verbose_json":
            token_ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
            language = self.rules.language_of(token_ids)
            shown |= {"task": self.task, "language": language, "duration": seconds}
        if segments is not None:
            shown["segments"] = [segment.model_dump() for segment in segments]
        return json.dumps(shown)

    async def _segments(
        self, outputs: Sequence[RequestOutput], times: TimeTokens
    ) -> list[TranscriptSegment]:
        """Segments of all prompts, whose outputs are whole, in order."""
        shown: list[TranscriptSegment] = []
        begin = 0.0
        for output, seconds in zip(outputs, self.durations, strict=True):
            (completion,) = output.outputs
            logprob = _mean_logprob(completion, times)
            (no_speech,) = completion.label_logprobs or (-inf,)
            for segment in times.segments(completion.token_ids, begin=begin, seconds=seconds):
                tokens = list(segment.token_ids)
                text = await self.context.text.decode(tokens)
                shown.append(
                    TranscriptSegment(
                        id=len(shown),
                        seek=round(begin * 100),
                        start=round(segment.start, 3),
                        end=round(segment.end, 3),
                        text=text,
                        tokens=tokens,
                        temperature=self.params.temperature,
                        avg_logprob=logprob,
                        compression_ratio=compression_ratio(text),
                        no_speech_prob=exp(no_speech),
                    )
                )
            begin += seconds
        return shown

    async def _deltas(self) -> AsyncGenerator[str, None]:
        """Deltas of the text, in order."""
        texts = _TextsInOrder()
        async with aclosing(self.outputs()) as outputs:
            async for place, output in outputs:
                _check_whole(output)
                delta = texts.add(place, output.outputs[0].text, is_last=output.finished)
                if delta:
                    yield delta

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Events in vLLM's format: chunks with deltas of the text, then one with the usage."""
        kind = "transcription.chunk" if self.task == "transcribe" else "translation.chunk"
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        is_continuous = self.body.stream_continuous_usage_stats
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                usage = {"usage": self._shown_usage()} if is_continuous else {}
                yield _event({**head, "choices": [{"delta": {"content": delta}}], **usage})
        yield _event({**head, "choices": [], "usage": self._shown_usage()})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Events in OpenAI's format: deltas of the text, then the whole text.

        A delta is also where readers of vLLM's chunks look for it.
        """
        text = ""
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                text += delta
                choices = [{"delta": {"content": delta}}]
                yield _event({"type": "transcript.text.delta", "delta": delta, "choices": choices})
        prompt = sum(self.usage.prompt_tokens.values())
        usage = {
            "type": "tokens",
            "input_tokens": prompt,
            "output_tokens": self.usage.completion_tokens,
            "total_tokens": prompt + self.usage.completion_tokens,
        }
        yield _event({"type": "transcript.text.done", "text": text, "usage": usage})


def _mean_logprob(completion: CompletionOutput, times: TimeTokens) -> float:
    """Mean log-probability of text, times and the end, without language and task."""
    written = [
        entry[token].logprob
        for token, entry in zip(completion.token_ids, completion.logprobs or (), strict=False)
        if entry and not times.end < token < times.first
    ]
    return sum(written) / max(1, len(written))


@dataclass(slots=True)
class _TextsInOrder:
    """Joins concurrent texts in the order of their chunks."""

    _has_begun: bool = False
    _current: int = 0
    _held: dict[int, str] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)

    def add(self, place: int, text: str, *, is_last: bool) -> str:
        """Add text of a chunk, and return what can be sent now."""
        self._held[place] = self._held.get(place, "") + text
        if is_last:
            self._ended.add(place)
        delta = self._held.pop(self._current, "")
        while self._current in self._ended:
            self._current += 1
            delta += self._held.pop(self._current, "")
        delta = delta if self._has_begun else delta.lstrip()
        self._has_begun |= bool(delta)
        return delta


async def speech_job(
    context: Context, body: SpeechBody, answer_id: str, task: SpeechTask
) -> SpeechJob:
    """Validate a speech request, and decode its file.

    Raises:
        RequestError: Fields are invalid, or the file is not audio.
        ServerError: Unknown model, still loading, no audio support, or the queue is full.
    """
    await context.check_ready()
    model = context.model_name(body.model)
    rules = await context.speech_rules()
    body.check_fields(allows_unknown=context.args.allow_unknown_fields)
    has_timestamps = body.wants_timestamps and (
        rules.times is not None or body.response_format in SUBTITLES
    )
    requested = RequestedSpeech(language=body.language, task=task, has_timestamps=has_timestamps)
    prompt = await _prompt(context, rules, body, requested)
    params = _params(body, has_timestamps=has_timestamps)
    content = await body.file.read()
    with context.admission.place_for(1, {}):
        audio = await _decoded(context, content)
    windows = audio.windows(rules.max_seconds)
    size = len(prompt["prompt_token_ids"]) + _NUM_BEGINNING
    return SpeechJob(
        context=context,
        body=body,
        params=params,
        prompt_sizes=[size] * len(windows),
        make_prompts=partial(_made, windows, prompt),
        answer_id=answer_id,
        model=model,
        lora_request=None,
        rules=rules,
        task=task,
        durations=[window.seconds for window in windows],
        times=rules.times if has_timestamps else None,
    )


def _params(body: SpeechBody, *, has_timestamps: bool) -> SamplingParams:
    """Sampling parameters of a body."""
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        seed=body.seed,
        max_tokens=body.max_completion_tokens,
        logprobs=0 if has_timestamps else None,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )


async def _prompt(
    context: Context, rules: SpeechRules, body: SpeechBody, requested: RequestedSpeech
) -> TokensPrompt:
    """Decoder prompt, which ends with the start token."""
    said: list[int] = []
    most = context.text.max_model_len // 2 - 1
    if body.prompt:
        text = f" {body.prompt.strip()}"
        said = await context.text.encode(text, add_special_tokens=False, param="prompt")
    rules.choices(requested)  # refused early
    return TokensPrompt(
        prompt_token_ids=rules.behind(said[-most:]),
        speech_language=requested.language,
        speech_task=requested.task or "transcribe",
        speech_timestamps=requested.has_timestamps,
    )


async def _decoded(context: Context, content: bytes) -> Audio:
    try:
        return await context.aside(partial(audio_of_file, content), cost=SMALL_COST + len(content))
    except ImportError as error:
        raise ServerError(501, str(error)) from error


async def _made(windows: Sequence[Audio], prompt: TokensPrompt) -> list[Prompt]:
    """The prompt with the audio of each window."""
    return [
        {**prompt, "multi_modal_data": {"audio": (window.samples, window.sampling_rate)}}
        for window in windows
    ]


def _check_whole(output: RequestOutput) -> None:
    """Refuse to return a partial transcript as a complete one.

    Raises:
        ServerError: 503, the request was aborted.
    """
    if output.outputs[0].finish_reason == "abort":
        raise ServerError(503, "the request was aborted before the transcript was complete")


def _event(content: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()

"""Segments of a transcript with their times, and subtitles of them."""

import re
import zlib
from collections.abc import Callable, Iterable
from html import escape
from typing import Final

from pagedserve.server.speech.protocol import TranscriptSegment

# Segments to a file of subtitles.
Subtitles = Callable[[Iterable[TranscriptSegment]], str]


def compression_ratio(text: str) -> float:
    """Bytes of a text per byte that zlib makes of them: high where it repeats itself."""
    content = text.encode()
    return len(content) / len(zlib.compress(content))


def _srt(segments: Iterable[TranscriptSegment]) -> str:
    return "\n".join(
        f"{number}\n{_cue(segment, ',', segment.text)}"
        for number, segment in enumerate(segments, 1)
    )


def _vtt(segments: Iterable[TranscriptSegment]) -> str:
    # There "<" begins a tag, and "&" the name of a character.
    cues = (_cue(segment, ".", escape(segment.text, quote=False)) for segment in segments)
    return "\n".join(["WEBVTT\n", *cues])


# By response format.
SUBTITLES: Final[dict[str, Subtitles]] = {"srt": _srt, "vtt": _vtt}


def _cue(segment: TranscriptSegment, point: str, text: str) -> str:
    # An arrow or an empty line in the text would end the cue.
    line = " ".join(re.sub("-+->", "->", text).split())
    return f"{_time(segment.start, point)} --> {_time(segment.end, point)}\n{line}\n"


def _time(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, seconds_left = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds_left:02}{point}{milliseconds:03}"

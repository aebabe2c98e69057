"""Subtitles of segments whose text has characters with a meaning there."""

from pagedserve.server.speech.protocol import TranscriptSegment
from pagedserve.server.speech.segments import SUBTITLES

SEGMENTS = [
    TranscriptSegment.model_construct(start=0.0, end=1.25, text=" AT&T <i>says</i>\n\nyes"),
    TranscriptSegment.model_construct(start=3661.0, end=3662.5, text=" 1 --> 2"),
]


def test_text_ends_no_cue_of_an_srt_file() -> None:
    assert SUBTITLES["srt"](SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,250\nAT&T <i>says</i> yes\n\n"
        "2\n01:01:01,000 --> 01:01:02,500\n1 -> 2\n"
    )


def test_text_of_a_vtt_file_has_no_tags_and_no_names_of_characters() -> None:
    assert SUBTITLES["vtt"](SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nAT&amp;T &lt;i&gt;says&lt;/i&gt; yes\n\n"
        "01:01:01.000 --> 01:01:02.500\n1 --&gt; 2\n"
    )

"""Streams of a file that joins several, each a file that libsndfile reads to its end.

libsndfile reads the first stream of Ogg and FLAC files, and as much of an MP3 file as its tag frame
("Xing" or "Info") says.  Without a tag it estimates the length from the first bitrate.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Final

# The first page of an Ogg stream; the group has the number of its segments.
_OGG_START: Final = re.compile(rb"OggS\0[\x02\x06].{20}(.)", re.DOTALL)
_FLAC_START: Final = re.compile(rb"fLaC[\0\x80]\0\0\x22")
# Header of an MP3 frame: version, channels and the tag's place follow from its bits.
_MP3_HEADER: Final = rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x00-\xef]."
_MP3_FRAME: Final = re.compile(rb"\0*(" + _MP3_HEADER + rb")", re.DOTALL)
# A tag frame with its flags, and the two numbers that they announce.
_MP3_TAG: Final = re.compile(
    _MP3_HEADER + rb"(?:\0{9}|\0{17}|\0{32})(?:Xing|Info)\0\0\0(.)(.{4})(.{4})", re.DOTALL
)
_HAS_FRAMES_AND_BYTES: Final = 3
# Part of the bytes after a tag that it must announce, unless tags of other kinds follow.
_TAGGED: Final = 0.99
_TAGS_BEHIND: Final = (b"TAG", b"APETAGEX", b"LYRICSBEGIN")
# Bytes of the shortest frame, 8 kbit/s at 24 kHz.
_MIN_FRAME_BYTES: Final = 24
_MP3_RATES: Final = (44_100, 48_000, 32_000)


def streams_of(content: bytes) -> list[bytes]:
    """Split a file into its streams; a file of another format is one."""
    if content.startswith(b"OggS"):
        return _split(content, _ogg_starts(content))
    if content.startswith(b"fLaC"):
        return _split(content, (found.start() for found in _FLAC_START.finditer(content)))
    if content.startswith((b"ID3", b"\xff")):
        tags = (found.start() for found in _MP3_TAG.finditer(content))
        return [_tagged(stream) for stream in _split(content, tags)]
    return [content]


def _split(content: bytes, starts: Iterable[int]) -> list[bytes]:
    """Split before each start but the first: what precedes that is of the first stream."""
    ends = [*islice(starts, 1, None), len(content)]
    return [content[start:end] for start, end in pairwise([0, *ends])]


def _ogg_starts(content: bytes) -> Iterator[int]:
    """Where streams start; the first pages of streams that run together follow each other."""
    end = None
    for page in _OGG_START.finditer(content):
        if page.start() != end:
            yield page.start()
        num_segments = page[1][0]
        end = page.end() + num_segments + sum(content[page.end() : page.end() + num_segments])


def _tagged(stream: bytes) -> bytes:
    """An MP3 stream with a tag, in front if none announces all of it."""
    start = 0
    if stream.startswith(b"ID3"):  # its size has 7 bits in each byte
        start = 10 + sum(byte << 7 * place for place, byte in enumerate(stream[9:5:-1]))
    frame = _MP3_FRAME.match(stream, start)
    if frame is None:
        return stream
    tag = _MP3_TAG.match(stream, frame.start(1))
    if tag is not None and tag[1][0] & 3 == _HAS_FRAMES_AND_BYTES:
        num_bytes = int.from_bytes(tag[3], "big")
        is_all = num_bytes >= _TAGGED * (len(stream) - tag.start())
        if is_all or stream.startswith(_TAGS_BEHIND, tag.start() + num_bytes):
            return stream
    return _tag(frame[1], len(stream) // _MIN_FRAME_BYTES + 1) + stream


def _tag(header: bytes, num_frames: int) -> bytes:
    """A tag frame that announces a number of frames such as one with a header."""
    version, is_mono = header[1] >> 3 & 3, header[3] >> 6 == 3  # noqa: PLR2004
    is_mpeg1 = version == 3  # noqa: PLR2004
    # bitrate 9, no padding, no checksum
    header = bytes([header[0], header[1] | 1, 0x90 | header[2] & 0x0C, header[3]])
    rate = _MP3_RATES[header[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}[version]
    size = 144 * 128_000 // rate if is_mpeg1 else 72 * 80_000 // rate
    num_zeros = {(True, False): 32, (False, True): 9}.get((is_mpeg1, is_mono), 17)
    fields = b"Xing" + (1).to_bytes(4, "big") + num_frames.to_bytes(4, "big")
    return (header + bytes(num_zeros) + fields).ljust(size, b"\0")

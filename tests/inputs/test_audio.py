"""Files of audio: joined streams, MP3 files without a tag that says their length, containers."""

import io

import numpy as np
import pytest

from pagedserve.errors import RequestError
from pagedserve.inputs import audio
from pagedserve.inputs.audio import MAX_STREAMS, audio_of_file

av = pytest.importorskip("av")
soundfile = pytest.importorskip("soundfile")
RATE = 16_000
# Half a second of silence, whose frames have a lower bitrate, and half a second of noise.
SAMPLES = np.concatenate(
    (np.zeros(RATE // 2), np.random.default_rng(0).uniform(-0.5, 0.5, RATE // 2))
)


def file_of(
    kind: str, subtype: str | None = None, rate: int = RATE, num_channels: int = 1
) -> bytes:
    file = io.BytesIO()
    samples = np.stack([SAMPLES[:rate]] * num_channels, axis=1)
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def without_tag(mp3: bytes) -> bytes:
    """An MP3 file whose tag frame is one of silence."""
    return mp3.replace(b"Xing", bytes(4)).replace(b"Info", bytes(4))


FORMATS = [("OGG", "VORBIS"), ("OGG", "OPUS"), ("FLAC", None), ("MP3", None)]


@pytest.mark.parametrize(("kind", "subtype"), FORMATS)
def test_all_streams_of_a_joined_file_are_read(kind: str, subtype: str | None) -> None:
    file = file_of(kind, subtype)
    one, three = audio_of_file(file), audio_of_file(file * 3)
    assert one.seconds == 1
    np.testing.assert_array_equal(three.samples, np.tile(one.samples, 3))


@pytest.mark.parametrize("num_channels", [1, 2])
@pytest.mark.parametrize("rate", [8_000, 11_025, 24_000, 44_100])
def test_an_mp3_file_without_a_tag_is_read_to_its_end(rate: int, num_channels: int) -> None:
    tagged = file_of("MP3", rate=rate, num_channels=num_channels)
    bare = without_tag(tagged)
    expected = audio_of_file(tagged).seconds
    # Without the tag, the encoder's silence at both ends is not cut.
    assert expected <= audio_of_file(bare).seconds < expected + 0.2


def test_joined_mp3_files_are_read_where_some_have_no_tag() -> None:
    tagged = file_of("MP3")
    bare = without_tag(tagged)
    id3 = b"ID3\4\0\0\0\0\1\0" + b"\xff\xfb\x90\0" * 32
    for file in (bare + bare, tagged + bare, bare + tagged, id3 + tagged + id3 + tagged):
        assert 2 <= audio_of_file(file).seconds < 2.4


def test_what_joined_files_may_not_have_is_named() -> None:
    with pytest.raises(RequestError, match="joins streams of 8000 and 16000 samples per second"):
        audio_of_file(file_of("FLAC") + file_of("FLAC", rate=8_000))
    empty = file_of("FLAC", rate=1)
    with pytest.raises(RequestError, match="joins 1001 streams; at most 1000 are accepted"):
        audio_of_file(empty * (MAX_STREAMS + 1))


def recorded(container: str, codec: str, form: str, layout: str = "mono") -> bytes:
    """The samples in a container, the second channel half as loud."""
    file = io.BytesIO()
    channels = [SAMPLES, SAMPLES / 2] if layout == "stereo" else [SAMPLES]
    numbers = (np.stack(channels) * 2**15).astype(np.int16)
    frame = av.AudioFrame.from_ndarray(numbers, format="s16p", layout=layout)
    frame.sample_rate = RATE
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=RATE, layout=layout)
        stream.format = form
        for part in (*av.AudioResampler(format=form).resample(frame), None):
            output.mux(stream.encode(part))
    return file.getvalue()


@pytest.mark.parametrize(("layout", "loudness"), [("mono", 1), ("stereo", 0.75)])
@pytest.mark.parametrize(
    ("container", "codec", "form"),
    [("matroska", "pcm_s16le", "s16"), ("ipod", "alac", "s16p"), ("mov", "pcm_s16le", "s16")],
)
def test_audio_in_a_container_is_what_was_recorded(
    container: str, codec: str, form: str, layout: str, loudness: float
) -> None:
    found = audio_of_file(recorded(container, codec, form, layout))
    assert found.sampling_rate == RATE
    np.testing.assert_allclose(found.samples, SAMPLES * loudness, atol=2**-15)


@pytest.mark.parametrize(
    ("container", "codec", "form"), [("webm", "libopus", "flt"), ("mp4", "aac", "fltp")]
)
def test_what_browsers_record_is_read(container: str, codec: str, form: str) -> None:
    found = audio_of_file(recorded(container, codec, form))
    assert 1 <= found.seconds < 1.2
    half = len(found.samples) // 2
    quiet, loud = (np.abs(part).mean() for part in np.split(found.samples[: 2 * half], [half]))
    assert quiet < 0.1 < loud


def test_containers_that_cannot_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = recorded("ipod", "alac", "s16p")
    for broken in (file[:100], b"\x1a\x45\xdf\xa3" + bytes(1000), b"\0\0\0\x18ftyp" + file[:50]):
        with pytest.raises(RequestError, match="cannot be decoded"):
            audio_of_file(broken)
    monkeypatch.setattr(audio, "MAX_SAMPLES", RATE // 2)
    with pytest.raises(RequestError, match="too long"):
        audio_of_file(file)

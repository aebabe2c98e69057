"""Audio of prompts, from Python or from files, before it is resampled for a model.

soundfile and PyAV are extras, imported with the first file.
"""

from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from math import ceil
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import RequestError, extra_needed
from pagedserve.inputs.audio_containers import container_of, decoded_container
from pagedserve.inputs.audio_streams import streams_of

if TYPE_CHECKING:
    from typing import TypeGuard

# Why prompts of most models may not contain audio.
NO_AUDIO: Final = "the model does not accept audio"
# Limits of one file: samples of all its channels, duration, and streams that it joins.
MAX_SAMPLES: Final = 1 << 26
MAX_SECONDS: Final = 2 * 3600
MAX_STREAMS: Final = 1_000
_ACCEPTED: Final = '{"audio": (samples, sampling_rate)}'
_RATES: Final = (1_000, 768_000)
# Seconds around a cut that are searched, and the length of the silence that is looked for.
_SEARCHED: Final = 1.0
_QUIET: Final = 0.1


class Audio(NamedTuple):
    """A mono audio signal.

    Attributes:
        samples: Float32 ``[N]``, from -1 to 1.
        sampling_rate: Samples per second.
    """

    samples: NDArray[np.float32]
    sampling_rate: int

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return len(self.samples) / self.sampling_rate

    def windows(self, most: float) -> "list[Audio]":
        """Split into chunks of at most `most` seconds and similar length, cut where it is quiet.

        Each cut is in the middle of the quietest tenth of a second within half a second of where
        chunks of equal length would end.

        Args:
            most: Maximum seconds per chunk, at least 2.
        """
        if self.seconds <= most:
            return [self]
        number = ceil(self.seconds / (most - _SEARCHED))
        ends = [self._quiet_place(len(self.samples) * end // number) for end in range(1, number)]
        pieces = np.split(self.samples, ends)
        return [Audio(piece, self.sampling_rate) for piece in pieces]

    def _quiet_place(self, end: int) -> int:
        reach, width = (int(self.sampling_rate * part) for part in (_SEARCHED / 2, _QUIET))
        start = max(0, end - reach)
        searched = self.samples[start : end + reach].astype(np.float64)
        sums = np.concatenate(([0.0], np.cumsum(searched**2)))
        return start + int(np.argmin(sums[width:] - sums[:-width])) + width // 2


# Computes an encoder's features of audio, float32 ``[M, F]``, for a named prompt.
AudioFeatures: TypeAlias = Callable[[Audio, str], NDArray[np.float32]]


def audio_of(given: object, name: str) -> Audio | None:
    """Parse the audio of a prompt's ``multi_modal_data``; None where that is None.

    Args:
        given: A pair of samples, an array of floats from -1 to 1, and samples per second; or a list
            with one such pair.
        name: Name of the prompt in errors.

    Raises:
        RequestError: Any other value.
    """
    if given is None:
        return None
    pair = given[0] if isinstance(given, list) and len(given) == 1 else given
    if not _is_pair(pair):
        raise RequestError(
            f"the audio of {name} is of type {type(given).__name__}; it must be one of {_ACCEPTED}"
        )
    samples = np.asarray(pair[0])
    if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating):
        raise RequestError(
            f"the audio of {name} has shape {list(samples.shape)} and type {samples.dtype}; it "
            "must be one channel, floats from -1 to 1"
        )
    return _checked(samples.astype(np.float32), pair[1], f"the audio of {name}")


def audio_of_file(content: bytes) -> Audio:
    """Decode all streams of an audio file and average their channels.

    Raises:
        RequestError: It cannot be decoded, is too long, has no samples, or joins streams of several
            sampling rates.
        ImportError: soundfile or PyAV is missing.
    """
    container = container_of(content)
    with extra_needed("an audio file", "audio"):
        import_module("soundfile" if container is None else "av")
    try:
        if container is None:
            streams = streams_of(content)
            samples, rates, is_whole = _decoded(streams[:MAX_STREAMS])
        else:
            streams = [content]
            samples, rate, is_whole = decoded_container(content, container, MAX_SAMPLES)
            rates = {rate}
    except Exception as error:  # decoders raise many types
        raise RequestError(
            f"the file of {len(content)} bytes cannot be decoded ({type(error).__name__}); "
            "accepted are WAV, FLAC, Ogg, MP3, WebM, MP4 and other formats that libsndfile reads",
            param="file",
        ) from error
    is_whole = is_whole and len(samples) <= MAX_SECONDS * min(rates)
    if refusal := _refusal(len(streams), rates, is_whole=is_whole):
        raise RequestError(refusal, param="file")
    return _checked(samples, rates.pop(), "the file")


def _refusal(num_streams: int, rates: Collection[int], *, is_whole: bool) -> str | None:
    """Why a file whose streams can be decoded is refused."""
    if num_streams > MAX_STREAMS:
        return f"the file joins {num_streams} streams; at most {MAX_STREAMS} are accepted"
    if len(rates) > 1:
        shown = " and ".join(map(str, sorted(rates)))
        return f"the file joins streams of {shown} samples per second; one rate is accepted"
    if not is_whole:
        return (
            f"the file is too long; at most {MAX_SECONDS} seconds are accepted, and at most "
            f"{MAX_SAMPLES} samples in all channels"
        )
    return None


def _decoded(streams: Iterable[bytes]) -> tuple[NDArray[np.float32], set[int], bool]:
    """Samples and sampling rates of streams, and whether they are within the limit of samples."""
    import soundfile

    parts: list[NDArray[np.float32]] = []
    rates: set[int] = set()
    num_left = MAX_SAMPLES
    for stream in streams:
        # libsndfile opens the file: with Python's file objects it prints errors of broken files.
        with TemporaryFile() as copy:
            copy.write(stream)
            copy.seek(0)
            with soundfile.SoundFile(copy.fileno(), closefd=False) as file:
                most = num_left // file.channels
                found = file.read(most + 1, dtype="float32", always_2d=True)
                rates.add(file.samplerate)
        parts.append(found.mean(axis=1))
        num_left -= found.size
        if len(found) > most:
            return parts[0], rates, False
    return np.concatenate(parts), rates, True


def _is_pair(given: object) -> "TypeGuard[tuple[Any, Any]]":
    return isinstance(given, tuple) and len(given) == 2  # noqa: PLR2004


def _checked(samples: NDArray[np.float32], sampling_rate: Any, name: str) -> Audio:
    low, high = _RATES
    is_number = isinstance(sampling_rate, SupportsIndex) and not isinstance(sampling_rate, bool)
    if not is_number or not low <= sampling_rate <= high:
        raise RequestError(
            f"the sampling rate of {name} is {sampling_rate!r}; it must be an integer from {low} "
            f"to {high}, the samples per second"
        )
    if not len(samples):
        raise RequestError(f"{name} has no samples; it must have at least one")
    if not np.isfinite(samples).all():
        raise RequestError(f"{name} has samples that are no finite numbers")
    return Audio(samples, int(sampling_rate))

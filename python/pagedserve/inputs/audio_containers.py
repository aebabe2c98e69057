"""Audio in containers that libsndfile does not read, in which browsers and telephones record.

PyAV decodes it, which is imported with the first file.  The container is that of the first bytes:
FFmpeg would find others, playlists among them, which name files and addresses to be read.
"""

from io import BytesIO
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Names in FFmpeg of WebM and Matroska, and of MP4, M4A, 3GP and QuickTime, by place and bytes.
_CONTAINERS: Final = {"matroska": (0, b"\x1a\x45\xdf\xa3"), "mov": (4, b"ftyp")}


def container_of(content: bytes) -> str | None:
    """Name of a file's container; None for another file."""
    return next(
        (name for name, (at, mark) in _CONTAINERS.items() if content.startswith(mark, at)), None
    )


def decoded_container(
    content: bytes, container: str, most: int
) -> tuple[NDArray[np.float32], int, bool]:
    """Decode the first audio stream of a file.

    Args:
        content: The file.
        container: Its container, of `container_of`.
        most: Maximum samples of all channels.

    Returns:
        Mean of the channels, float32 ``[N]``; samples per second; whether it is all of the file.

    Raises:
        ValueError: The file has no audio.
        av.error.FFmpegError: It cannot be decoded.
    """
    import av

    parts: list[NDArray[np.float32]] = []
    num_left, rate = most, 0
    with av.open(BytesIO(content), "r", format=container) as file:
        if not file.streams.audio:
            raise ValueError("no audio")
        to_floats = av.AudioResampler(format="fltp")
        for frame in file.decode(audio=0):
            for floats in to_floats.resample(frame):
                samples, rate = floats.to_ndarray(), floats.sample_rate  # a stream may name half
                parts.append(samples.mean(axis=0, dtype=np.float32))
                num_left -= samples.size
            if num_left < 0:
                return np.concatenate(parts), rate, False
    return np.concatenate(parts), rate, True

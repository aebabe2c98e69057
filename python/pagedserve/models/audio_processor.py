"""Features for the encoder from a prompt's audio."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoFeatureExtractor

from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, RequestError, extra_needed
from pagedserve.inputs.audio import Audio
from pagedserve.models.load.files import find_model_files, first_line, quiet_transformers


class AudioProcessor:
    """Computes features; thread-safe.

    Attributes:
        sampling_rate: samples per second of the model's input.
        max_seconds: maximum duration of a prompt's audio.
    """

    def __init__(self, extractor: Any) -> None:
        """Store a feature extractor of transformers."""
        self._extractor = extractor
        self.sampling_rate: int = extractor.sampling_rate
        self.max_seconds: float = extractor.n_samples / extractor.sampling_rate

    def features(self, audio: Audio, name: str) -> NDArray[np.float32]:
        """Compute features, float32 ``[M, F]``, padded with silence to the same length.

        Args:
            audio: audio of any sampling rate.
            name: name of its prompt in errors.

        Raises:
            RequestError: it is longer than the model accepts, or much too loud.
            ImportError: it must be resampled, and the package is not installed.
        """
        if audio.seconds > self.max_seconds:
            raise RequestError(
                f"the audio of {name} has {audio.seconds:.2f} seconds; the model accepts at most "
                f"{self.max_seconds:g}"
            )
        samples = audio.samples
        if audio.sampling_rate != self.sampling_rate:
            samples = _resampled(audio, self.sampling_rate)
        made = self._extractor(samples, sampling_rate=self.sampling_rate, return_tensors="np")
        features: NDArray[np.float32] = made["input_features"][0]
        if not np.isfinite(features).all():
            raise RequestError(f"the audio of {name} is too loud; it must be floats from -1 to 1")
        return features


def _resampled(audio: Audio, sampling_rate: int) -> NDArray[np.float32]:
    resampled_audio = f"audio of {audio.sampling_rate} samples per second, where the model accepts "
    with extra_needed(f"{resampled_audio}{sampling_rate},", "audio"):
        import soxr
    resampled: NDArray[np.float32] = soxr.resample(
        audio.samples, audio.sampling_rate, sampling_rate
    )
    return resampled


def load_audio_processor(args: EngineArgs) -> AudioProcessor:
    """Load the audio processor of a model that accepts audio; reads no weights.

    Raises:
        ModelLoadError: transformers cannot load it, or its features do not match the encoder.
    """
    with quiet_transformers():
        files = find_model_files(args)
        try:
            extractor: Any = AutoFeatureExtractor.from_pretrained(files.directory)
        except Exception as error:  # transformers raises many unrelated types here
            raise ModelLoadError(
                f"model {args.model!r} has no feature extractor that transformers can load: "
                f"{first_line(error)}"
            ) from error
    config: Any = files.hf_config
    made = extractor.feature_size, extractor.nb_max_frames
    accepted = config.num_mel_bins, 2 * config.max_source_positions
    if made != accepted:
        raise ModelLoadError(
            f"model {args.model!r}: its feature extractor makes features of shape {list(made)}, "
            f"and its encoder takes {list(accepted)}"
        )
    return AudioProcessor(extractor)

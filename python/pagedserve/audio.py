"""Audio of prompts, as Python has it: checked, and not yet brought to a model's sampling rate."""

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import RequestError

if TYPE_CHECKING:
    from typing import TypeGuard

# Why prompts of most models may have no audio.
NO_AUDIO: Final = "the model hears none"
_ACCEPTED: Final = '{"audio": (samples, sampling_rate)}'


class Audio(NamedTuple):
    """One channel of sound.

    Attributes:
        samples: Float32 ``[N]``, from -1 to 1.
        sampling_rate: Samples of a second.
    """

    samples: NDArray[np.float32]
    sampling_rate: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / self.sampling_rate


def audio_of(given: object, name: str) -> Audio | None:
    """The audio of a prompt's ``multi_modal_data``; None where that is None.

    Args:
        given: A pair of samples, an array of floats from -1 to 1, and samples of a second; or a
            list with one such pair.
        name: What an error calls the prompt.

    Raises:
        RequestError: Something else.
    """
    if given is None:
        return None
    pair = given[0] if isinstance(given, list) and len(given) == 1 else given
    if not _is_pair(pair):
        raise RequestError(
            f"the audio of {name} is of type {type(given).__name__}; it must be one of {_ACCEPTED}"
        )
    samples, sampling_rate = np.asarray(pair[0]), pair[1]
    if isinstance(sampling_rate, bool) or not isinstance(sampling_rate, int) or sampling_rate < 1:
        raise RequestError(
            f"the sampling rate of {name}'s audio is {sampling_rate!r}; it must be an integer, the "
            "samples of a second"
        )
    is_float = np.issubdtype(samples.dtype, np.floating)
    if samples.ndim != 1 or not is_float or not len(samples):
        raise RequestError(
            f"the audio of {name} has shape {list(samples.shape)} and type {samples.dtype}; it "
            "must be one channel of at least one sample, floats from -1 to 1"
        )
    if not np.isfinite(samples).all():
        raise RequestError(f"the audio of {name} has samples that are no finite numbers")
    return Audio(samples.astype(np.float32), sampling_rate)


def _is_pair(given: object) -> "TypeGuard[tuple[Any, Any]]":
    return isinstance(given, tuple) and len(given) == 2  # noqa: PLR2004

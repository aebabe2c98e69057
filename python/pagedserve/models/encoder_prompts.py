"""What is known of a model with an encoder and a decoder by those who make requests of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.speech import SpeechRules

# Those that run, by model_type: their layers attend through the interface.
FAMILIES: Final = ("bart", "marian", "mbart", "mt5", "pegasus", "t5", "whisper")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """How prompts of such a model begin and end.

    Attributes:
        decoder_prompt: token ids that a decoder starts with.
        max_encoder_len: most tokens of an encoder's prompt; of audio, the states of every one.
        speech: of a model whose encoder hears audio; None where it reads text.
    """

    decoder_prompt: tuple[int, ...]
    max_encoder_len: int
    speech: SpeechRules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """What an encoder reads for a request.

    Attributes:
        inputs: token ids ``[S]``, or of audio features float32 ``[M, F]``.
        num_states: S, that the encoder makes of it.
        text: as it was given; None where it was not.
    """

    inputs: Sequence[int] | NDArray[np.float32]
    num_states: int
    text: str | None = None

    @property
    def token_ids(self) -> list[int] | None:
        """Of a text; None of audio."""
        return None if isinstance(self.inputs, np.ndarray) else list(self.inputs)

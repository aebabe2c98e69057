"""Prompt format of encoder-decoder models, for the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.speech import SpeechRules

# Supported model_types: their layers use the attention interface.
FAMILIES: Final = ("bart", "marian", "mbart", "mt5", "pegasus", "t5", "whisper")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """Prompt format of such a model.

    Attributes:
        decoder_prompt: token ids that a decoder's prompt starts with.
        max_encoder_len: maximum tokens of an encoder's prompt; for audio, the states of every one.
        speech: special tokens of a speech model; None for a text encoder.
    """

    decoder_prompt: tuple[int, ...]
    max_encoder_len: int
    speech: SpeechRules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """Encoder input of a request.

    Attributes:
        inputs: token ids ``[S]``, or features of audio, float32 ``[M, F]``.
        num_states: S, number of the encoder's states.
        text: text as given; None if token ids were.
    """

    inputs: Sequence[int] | NDArray[np.float32]
    num_states: int
    text: str | None = None

    @property
    def token_ids(self) -> list[int] | None:
        """Token ids of a text; None for audio."""
        return None if isinstance(self.inputs, np.ndarray) else list(self.inputs)

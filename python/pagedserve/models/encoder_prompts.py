"""What is known of a model with an encoder and a decoder by those who make requests of it."""

from dataclasses import dataclass
from typing import Final

# Those that run, by model_type: their layers attend through the interface, without biases.
FAMILIES: Final = ("bart", "marian", "mbart", "pegasus")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """How prompts of such a model begin and end.

    Attributes:
        decoder_prompt: token ids that a decoder starts with.
        max_encoder_len: most tokens of an encoder's prompt.
    """

    decoder_prompt: tuple[int, ...]
    max_encoder_len: int

"""Prompts of speech models: audio for the encoder, a prefix for the decoder."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedserve.audio import Audio
from pagedserve.config import EngineArgs
from pagedserve.engine.token_rules import TokenRules
from pagedserve.errors import RequestError
from pagedserve.executor.protocol import ModelInfo
from pagedserve.images import TEXT_ALONE
from pagedserve.inputs import ParsedPrompt, tokenize_prompt
from pagedserve.models.encoder_prompts import EncoderInput
from pagedserve.speech import SpeechRules


class HearsAudio(Protocol):
    """Computes an encoder's features of audio."""

    def features(self, audio: Audio, name: str) -> NDArray[np.float32]:
        """Compute features; see ``pagedserve.models.audio_processor``."""


def audio_processor(args: EngineArgs, model: ModelInfo) -> HearsAudio | None:
    """Load the audio processor; None if the model does not accept audio.

    Raises:
        ModelLoadError: It cannot be loaded.
    """
    if model.encoder_decoder is None or model.encoder_decoder.speech is None:
        return None
    from pagedserve.models.audio_processor import load_audio_processor

    return load_audio_processor(args)


def audio_for_encoder(
    prompt: ParsedPrompt, name: str, processor: HearsAudio, num_states: int
) -> EncoderInput:
    """Encoder features of a prompt's audio.

    Raises:
        RequestError: No audio, audio that the model does not accept, or text beside it.
    """
    encoder = prompt if prompt.encoder is None else prompt.encoder
    if prompt.images or encoder.images:
        raise RequestError(f"{name} has images, and {TEXT_ALONE}")
    if encoder.audio is None:
        raise RequestError(
            f"{name} has no audio for the encoder; give it multi_modal_data="
            '{"audio": (samples, sampling_rate)}'
        )
    if prompt.encoder is not None and (encoder.text or encoder.token_ids or prompt.audio):
        raise RequestError(
            f"{name} must have audio alone for the encoder, whose text is empty, and text alone "
            "for the decoder"
        )
    return EncoderInput(inputs=processor.features(encoder.audio, name), num_states=num_states)


def begin_speech(
    prompt: ParsedPrompt,
    speech: SpeechRules,
    name: str,
    encode: Callable[[str], list[int]],
    vocab_size: int,
) -> tuple[ParsedPrompt, TokenRules]:
    """The decoder's prompt and the token rules for what follows it.

    Adds the start token if it is missing.  If nothing follows it, the model detects the language:
    the first new tokens are language and task.

    Args:
        prompt: Decoder prompt, which may be empty.
        speech: Speech tokens of the model.
        name: Name of the prompt in errors.
        encode: Function of the tokenizer that adds no special tokens.
        vocab_size: Vocabulary size; ids must be below it.

    Raises:
        RequestError: A task beside a prompt that has one, or one that the model lacks.
    """
    begun = [speech.start]
    if prompt.text or prompt.token_ids is not None:
        given = tokenize_prompt(prompt, name, encode=encode, vocab_size=vocab_size).token_ids
        begun = given if speech.start in given else [speech.start, *given]
    first: tuple[tuple[int, ...], ...] = ()
    if begun[-1] == speech.start:
        first = tuple(speech.choices(task=prompt.speech_task or "transcribe"))
    elif prompt.speech_task is not None:
        raise RequestError(
            f"{name} has speech_task, and its decoder_prompt sets the task: leave it out"
        )
    if all(len(choices) == 1 for choices in first):  # nothing is to be detected
        begun, first = [*begun, *(token for (token,) in first)], ()
    rules = TokenRules(
        first=first, suppressed=speech.suppressed, suppressed_first=speech.suppressed_first
    )
    return replace(prompt, token_ids=begun), rules

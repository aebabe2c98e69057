"""Prompts of encoder-decoders: their format, and the split into encoder and decoder prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import RequestError
from pagedserve.inputs.audio import NO_AUDIO, AudioFeatures
from pagedserve.inputs.images import TEXT_ALONE
from pagedserve.inputs.prompts import ParsedPrompt, tokenize_prompt
from pagedserve.inputs.speech import SpeechRules, TokenRules


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """Prompt format of an encoder-decoder.

    Attributes:
        decoder_prompt: Token ids that a decoder's prompt starts with.
        max_encoder_len: Maximum tokens of an encoder's prompt; for audio, the states of every one.
        speech: Special tokens of a speech model; None for a text encoder.
    """

    decoder_prompt: tuple[int, ...]
    max_encoder_len: int
    speech: SpeechRules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """Encoder input of a request.

    Attributes:
        inputs: Token ids ``[S]``, or features of audio, float32 ``[M, F]``.
        num_states: S, number of the encoder's states.
        text: Text as given; None if token ids were.
    """

    inputs: Sequence[int] | NDArray[np.float32]
    num_states: int
    text: str | None = None

    @property
    def token_ids(self) -> list[int] | None:
        """Token ids of a text; None for audio."""
        return None if isinstance(self.inputs, np.ndarray) else list(self.inputs)


class SplitPrompt(NamedTuple):
    """Decoder and encoder prompts.

    Attributes:
        decoder: Decoder prompt, which new tokens follow.
        encoder: Encoder prompt; None if there is none.
        rules: Token rules of the model; None if it has none.
    """

    decoder: ParsedPrompt
    encoder: EncoderInput | None = None
    rules: TokenRules | None = None


def split_prompt(
    prompt: ParsedPrompt,
    known: EncoderDecoder | None,
    name: str,
    *,
    vocab_size: int,
    encode: Callable[[str], list[int]],
    encode_bare: Callable[[str], list[int]],
    audio: AudioFeatures | None,
) -> SplitPrompt:
    """Split a prompt into the decoder's and the encoder's.

    Args:
        prompt: Prompt as given.
        known: Prompt format of the model; None if it has no encoder.
        name: Name of the prompt in errors.
        vocab_size: Vocabulary size; ids must be below it.
        encode: Function of the tokenizer that encodes with special tokens.
        encode_bare: Function of the tokenizer that adds no special tokens.
        audio: Computes features of audio; None if the model does not accept audio.

    Raises:
        RequestError: An encoder prompt for a model without an encoder, or one that is too long.
    """
    given = [prompt] if prompt.encoder is None else [prompt, prompt.encoder]
    if audio is None and any(side.audio or side.speech.keys for side in given):
        raise RequestError(f"{name} has audio, and {NO_AUDIO}")
    if known is None:
        if prompt.encoder is not None:
            raise RequestError(
                f"{name} has an encoder_prompt, and the model has no encoder that reads it: give "
                "one prompt"
            )
        return SplitPrompt(prompt)
    if known.speech is not None and audio is not None:
        heard = _audio_for_encoder(prompt, name, audio, known.max_encoder_len)
        decoder, rules = _begin_speech(prompt, known.speech, name, encode_bare, vocab_size)
        return SplitPrompt(decoder, heard, rules)
    return _split_text(
        prompt, known, name, vocab_size=vocab_size, encode=encode, encode_bare=encode_bare
    )


def _split_text(
    prompt: ParsedPrompt,
    known: EncoderDecoder,
    name: str,
    *,
    vocab_size: int,
    encode: Callable[[str], list[int]],
    encode_bare: Callable[[str], list[int]],
) -> SplitPrompt:
    encoder = prompt if prompt.encoder is None else prompt.encoder
    if prompt.images or encoder.images:
        raise RequestError(f"{name} has images, and {TEXT_ALONE}")
    read = tokenize_prompt(encoder, name, encode=encode, vocab_size=vocab_size)
    num_states = len(read.token_ids)
    if num_states > known.max_encoder_len:
        raise RequestError(
            f"{name} has {num_states} tokens for the encoder; it takes at most "
            f"{known.max_encoder_len}"
        )
    input_ = EncoderInput(inputs=read.token_ids, num_states=num_states, text=read.text)
    if prompt.encoder is None or (prompt.text is None and prompt.token_ids is None):
        return SplitPrompt(replace(prompt, token_ids=known.decoder_prompt), input_)
    # New tokens follow it, so it must not end with </s>.
    given = tokenize_prompt(prompt, name, encode=encode_bare, vocab_size=vocab_size).token_ids
    return SplitPrompt(replace(prompt, token_ids=_started(given, known)), input_)


def _started(token_ids: list[int], known: EncoderDecoder) -> list[int]:
    """Return a decoder prompt with the decoder's start token before it."""
    start = known.decoder_prompt[0]
    return token_ids if token_ids[0] == start else [start, *token_ids]


def _audio_for_encoder(
    prompt: ParsedPrompt, name: str, features: AudioFeatures, num_states: int
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
    return EncoderInput(inputs=features(encoder.audio, name), num_states=num_states)


def _begin_speech(
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
        RequestError: Something is requested beside a prompt that sets it, or the model lacks it.
    """
    begun, requested = [speech.start], prompt.speech
    if prompt.text or prompt.token_ids is not None:
        given = tokenize_prompt(prompt, name, encode=encode, vocab_size=vocab_size).token_ids
        begun = given if speech.start in given else [speech.start, *given]
    first: tuple[tuple[int, ...], ...] = ()
    if begun[-1] == speech.start:
        first = tuple(speech.choices(requested))
    elif given_keys := requested.keys:
        raise RequestError(
            f"{name} has {given_keys[0]}, and its decoder_prompt sets the task: leave it out"
        )
    # Nothing is to be detected, not even whether there is speech.
    if all(len(choices) == 1 for choices in first) and not requested.has_timestamps:
        begun, first = [*begun, *(token for (token,) in first)], ()
    return replace(prompt, token_ids=begun), speech.rules_after(begun, first)

"""Prompts of encoder-decoders, split into encoder and decoder prompts."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from pagedserve.audio import NO_AUDIO
from pagedserve.engine.speech_prompts import HearsAudio, audio_for_encoder, begin_speech
from pagedserve.engine.token_rules import TokenRules
from pagedserve.errors import RequestError
from pagedserve.executor.protocol import ModelInfo
from pagedserve.images import TEXT_ALONE
from pagedserve.inputs import ParsedPrompt, tokenize_prompt
from pagedserve.models.encoder_prompts import EncoderDecoder, EncoderInput


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
    model: ModelInfo,
    name: str,
    *,
    encode: Callable[[str], list[int]],
    encode_bare: Callable[[str], list[int]],
    audio: HearsAudio | None,
) -> SplitPrompt:
    """Split a prompt into the decoder's and the encoder's.

    Args:
        prompt: Prompt as given.
        model: Properties of the model.
        name: Name of the prompt in errors.
        encode: Function of the tokenizer that encodes with special tokens.
        encode_bare: Function of the tokenizer that adds no special tokens.
        audio: Audio processor; None if the model does not accept audio.

    Raises:
        RequestError: An encoder prompt for a model without an encoder, or one that is too long.
    """
    known = model.encoder_decoder
    given = [prompt] if prompt.encoder is None else [prompt, prompt.encoder]
    if audio is None and any(side.audio or side.speech_task for side in given):
        raise RequestError(f"{name} has audio, and {NO_AUDIO}")
    if known is None:
        if prompt.encoder is not None:
            raise RequestError(
                f"{name} has an encoder_prompt, and the model has no encoder that reads it: give "
                "one prompt"
            )
        return SplitPrompt(prompt)
    if known.speech is not None and audio is not None:
        heard = audio_for_encoder(prompt, name, audio, known.max_encoder_len)
        decoder, rules = begin_speech(prompt, known.speech, name, encode_bare, model.vocab_size)
        return SplitPrompt(decoder, heard, rules)
    return _split_text(prompt, known, name, encode, model.vocab_size)


def _split_text(
    prompt: ParsedPrompt,
    known: EncoderDecoder,
    name: str,
    encode: Callable[[str], list[int]],
    vocab_size: int,
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
    given = tokenize_prompt(prompt, name, encode=encode, vocab_size=vocab_size).token_ids
    return SplitPrompt(replace(prompt, token_ids=_started(given, known)), input_)


def _started(token_ids: list[int], known: EncoderDecoder) -> list[int]:
    """Return a decoder prompt with the decoder's start token before it."""
    start = known.decoder_prompt[0]
    return token_ids if token_ids[0] == start else [start, *token_ids]

"""Encoder-decoder models: the encoder reads a whole prompt, the decoder uses paged attention.

The encoder runs once per request, on its prompt alone, so it needs no pages and its result cannot
depend on the batch.  Its states become keys and values in the blocks of the request's cross table
(`pagedserve.attention.cross`).  A check compares logits with those of the model's original
attention for a batch of prompts, over memory full of NaN, in two steps of which the second writes
no such keys.
"""

import math
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.attention.backend import AttentionBackend
from pagedserve.attention.cross import WholeAttention
from pagedserve.cache.layers import LayerShape
from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.inputs.encoder_prompts import EncoderDecoder
from pagedserve.inputs.speech import SpeechRules
from pagedserve.models.audio_processor import load_audio_processor
from pagedserve.models.check.numerics import (
    TOLERANCE,
    compare,
    prompt_of,
    using_attention,
    vocab_size,
)
from pagedserve.models.check.paged_logits import encoder_decoder_logits
from pagedserve.models.check.probe import CallRecorder, refusing_failures
from pagedserve.models.forward import ForwardContext, decoder_logits, forwarding
from pagedserve.models.limits import eos_token_ids, num_positions
from pagedserve.models.load.files import architecture_of
from pagedserve.models.relative_bias import list_biases

# Tokens of the check's prompts, of the encoder and of the decoder.
_ENCODED: Final = (13, 5)
_DECODED: Final = (7, 11)


def encoder_decoder_of(model: PreTrainedModel, args: EngineArgs) -> EncoderDecoder:
    """Prompt format of the model.

    Raises:
        UnsupportedModelError: its config has no decoder start token.
        ModelLoadError: it accepts audio, and its feature extractor cannot be loaded.
    """
    start = _named(model, "decoder_start_token_id")
    if start is None:
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: its config names no "
            "decoder_start_token_id"
        )
    if _accepts_audio(model):
        max_seconds = load_audio_processor(args).max_seconds
        speech = SpeechRules.of(
            start,
            model.generation_config,
            ends=eos_token_ids(model.generation_config, model.config, vocab_size(model)),
            vocab_size=vocab_size(model),
            max_seconds=max_seconds,
            num_times=model.config.max_source_positions,
        )
        return EncoderDecoder(
            decoder_prompt=(start,),
            max_encoder_len=model.config.max_source_positions,
            speech=speech,
        )
    forced = _named(model, "forced_bos_token_id")
    return EncoderDecoder(
        decoder_prompt=(start,) if forced is None else (start, forced),
        # Models with only relative biases read texts as long as those that they generate.
        max_encoder_len=num_positions(model.config) or args.max_model_len or 0,
    )


def _named(model: PreTrainedModel, name: str) -> int | None:
    """A token of the generation config, or else of the model's config."""
    found = getattr(model.generation_config, name, None)
    return cast("int | None", getattr(model.config, name, None) if found is None else found)


def _accepts_audio(model: PreTrainedModel) -> bool:
    """Whether its encoder takes features of audio."""
    encoder: Any = model.get_encoder()
    return bool(encoder.main_input_name == "input_features")


@torch.inference_mode()
def encoder_states(model: PreTrainedModel, inputs: Tensor) -> Tensor:
    """Encoder states ``[S, F]`` of a prompt ``[S]``, or of features ``[M, N]``."""
    encoder: Any = model.get_encoder()
    dtype = model.dtype if inputs.is_floating_point() else inputs.dtype
    given = {encoder.main_input_name: inputs[None].to(model.device, dtype)}
    with forwarding(ForwardContext(attention=WholeAttention())):
        return cast(Tensor, encoder(**given).last_hidden_state[0])


def no_states(model: PreTrainedModel) -> Tensor:
    """Zeros ``[1, F]``, for a decoder call without new encoder states."""
    config: PreTrainedConfig = model.config
    return torch.zeros(1, config.hidden_size, dtype=model.dtype, device=model.device)


def check_encoder_decoder(
    model: PreTrainedModel, backend: AttentionBackend
) -> tuple[LayerShape, ...]:
    """Find the shapes of the decoder's attention calls, and check that its logits are correct.

    Args:
        model: as transformers built it, with our attention function.
        backend: attention backend.

    Raises:
        UnsupportedModelError: its layers do not each have one self-attention and one
            cross-attention, or the logits differ.
    """
    with refusing_failures(model), torch.inference_mode():
        prompts = [prompt_of(model, length) for length in _DECODED]
        expected = reference_logits(model)
        list_biases(model)
        layers = _find_layers(model)
        states = _test_states(model)
        found = encoder_decoder_logits(model, layers, prompts, states, backend)
    differ = "over paged attention its logits differ from its own"
    compare(model, found, expected, TOLERANCE[model.dtype], differ)
    return layers


@torch.inference_mode()
def reference_logits(model: PreTrainedModel) -> list[Tensor]:
    """Logits, float32 ``[T, V]``, of test prompts with the model's original attention."""
    prompts = [prompt_of(model, length) for length in _DECODED]
    with using_attention(model, "eager"):
        states = _test_states(model)
        return [_own_logits(model, *pair) for pair in zip(states, prompts, strict=True)]


def _test_states(model: PreTrainedModel) -> list[Tensor]:
    """Encoder states of two test prompts; for audio, which has one length, the second is cut."""
    if not _accepts_audio(model):
        return [encoder_states(model, prompt_of(model, length)) for length in _ENCODED]
    shape = model.config.num_mel_bins, 2 * model.config.max_source_positions
    states = encoder_states(model, torch.arange(math.prod(shape)).sin().reshape(shape))
    return [states, states[: _ENCODED[1]]]


def _own_logits(model: PreTrainedModel, states: Tensor, prompt: Tensor) -> Tensor:
    """Logits, float32 ``[T, V]``, of a decoder's prompt with given encoder states."""
    own: Any = model
    output = own(encoder_outputs=(states[None],), decoder_input_ids=prompt[None], use_cache=False)
    return cast(Tensor, output.logits)[0].float()


def _find_layers(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    recorder, prompt = CallRecorder(), prompt_of(model, 2)
    context = ForwardContext(
        attention=recorder,
        positions=torch.arange(2, device=model.device)[None],
        encoder_states=no_states(model).expand(3, -1),  # distinguishes the two kinds of calls
    )
    decoder_logits(model, prompt[None], context)
    layers = tuple(recorder.layers)
    config = model.config
    num_layers = getattr(config, "decoder_layers", None) or config.num_decoder_layers
    alternate = [layer.is_cross for layer in layers] == [False, True] * num_layers
    if not alternate or len({layer.elements_per_token for layer in layers}) != 1:
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: the {num_layers} layers "
            f"of its decoder made {len(layers)} calls of the attention interface; accepted are "
            "decoders whose every layer attends to its own tokens, then to the encoder's, with "
            "keys of one size"
        )
    recorder.number(model)
    return layers

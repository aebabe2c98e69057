"""Encoder models: bidirectional attention to a whole text, without a KV cache across steps.

Every layer attends only to the step's keys, so all of them share one pool, each overwriting the
previous one's contents.  A check compares their states with those of the model's original attention
for a batch of prompts in another order, over memory full of NaN.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from pagedserve.attention.backend import AttentionBackend
from pagedserve.cache.layers import LayerShape
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.check.numerics import TOLERANCE, compare, prompt_of, using_attention
from pagedserve.models.check.paged_logits import encoder_hidden_states
from pagedserve.models.check.probe import CallRecorder, refusing_failures
from pagedserve.models.forward import ForwardContext, flat_batch_hidden_states
from pagedserve.models.load.files import architecture_of

# Tokens of the prompts of the check; the first exceeds every window.
_LENGTHS: Final = (41, 9, 23)


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether the attention of a config's base model is bidirectional."""
    try:
        with torch.device("meta"):
            model: Any = AutoModel.from_config(config)
    except Exception:  # noqa: BLE001  # loading it reports the reason
        return False
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return bool(causal) and not any(causal)


def check_encoder(
    model: PreTrainedModel, *, max_model_len: int, backend: AttentionBackend
) -> tuple[LayerShape, ...]:
    """Find the shapes of each layer's attention, and check that ours computes the model's states.

    Args:
        model: as transformers built it, with our attention function.
        max_model_len: maximum tokens of a prompt.
        backend: attention backend.

    Raises:
        UnsupportedModelError: a layer does not use our attention function, or its states differ.
    """
    with refusing_failures(model), torch.inference_mode():
        layers = _find_layers(model)
        windows = [layer.window for layer in layers if layer.window is not None]
        longest = max([_LENGTHS[0], *(window + 8 for window in windows)])
        prompts = [
            prompt_of(model, min(length, max_model_len)) for length in (longest, *_LENGTHS[1:])
        ]
        expected = _own_states(model, prompts)
        for order in ([0, 1, 2], [2, 0, 1]):
            found = encoder_hidden_states(
                model, layers, [prompts[place] for place in order], backend
            )
            differ = "its states differ from those of its original attention"
            in_order = [expected[place] for place in order]
            compare(model, found, in_order, TOLERANCE[model.dtype], differ)
    return layers


def reference_states(model: PreTrainedModel, *, max_model_len: int) -> list[Tensor]:
    """States ``[T, F]`` of test prompts with the model's original attention."""
    with torch.inference_mode():
        prompts = [prompt_of(model, min(length, max_model_len)) for length in _LENGTHS]
        return _own_states(model, prompts)


def _own_states(model: PreTrainedModel, prompts: Sequence[Tensor]) -> list[Tensor]:
    with using_attention(model, "eager"):
        return [flat_batch_hidden_states(model, prompt[None]) for prompt in prompts]


def _find_layers(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    recorder = CallRecorder()
    prompt = prompt_of(model, 2)[None]
    flat_batch_hidden_states(model, prompt, ForwardContext(attention=recorder))
    num_layers = model.config.get_text_config().num_hidden_layers
    stored = [(layer.num_kv_heads, layer.key_size, layer.value_size) for layer in recorder.layers]
    if len(stored) != num_layers or any(first != second for first, second in pairwise(stored)):
        raise UnsupportedModelError(
            f"architecture {architecture_of(model.config)} cannot be run: its {num_layers} layers "
            f"made {len(stored)} calls of the attention interface; accepted are encoders whose "
            "every layer attends through it once, with keys of one size"
        )
    recorder.number(model)
    return tuple(recorder.layers)

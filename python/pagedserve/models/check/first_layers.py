"""The first layers of a model, up to the first of each kind: enough to check a sharding plan.

A plan names layers by stars, so layers of one kind are split alike.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def num_first_layers(model: PreTrainedModel) -> int | None:
    """Number of layers up to the first of each kind; None if that is not much less than all.

    Layers are of one kind if they have the same modules and parameters, of the same shapes.
    """
    layers = _layers_of(model)
    config: Any = model.config.get_text_config()
    shares_keys = bool(getattr(config, "num_kv_shared_layers", None))
    if layers is None or shares_keys:
        return None
    kinds = [
        (
            *(type(module) for module in layer.modules()),
            *((name, tuple(weight.shape)) for name, weight in layer.named_parameters()),
        )
        for layer in layers
    ]
    number = 1 + max(kinds.index(kind) for kind in set(kinds))
    return number if 2 * number <= len(kinds) else None


@contextmanager
def first_layers(model: PreTrainedModel, number: int) -> Iterator[None]:
    """A context in which a model has only its first layers."""
    decoder, layers = _decoder_of(model), _layers_of(model)
    decoder.layers = None if layers is None else layers[:number]
    try:
        yield
    finally:
        decoder.layers = layers


def config_of_first_layers(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    """Config of a model with the first layers of another."""
    config = copy.deepcopy(config)
    fields = vars(config.get_text_config())
    num_layers = fields["num_hidden_layers"]
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == num_layers:
            fields[name] = value[:number]
    fields["num_hidden_layers"] = number
    return config


def _decoder_of(model: Any) -> Any:
    return model.get_decoder()


def _layers_of(model: PreTrainedModel) -> nn.ModuleList | None:
    """Layers of a decoder with one stack of them; None for other models."""
    layers = getattr(_decoder_of(model), "layers", None)
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    is_stack = isinstance(layers, nn.ModuleList) and len(layers) == num_layers
    return layers if is_stack else None

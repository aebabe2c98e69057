"""Lowered length thresholds of a model, so that a short check covers the code beyond them.

A sliding window of 4,096 tokens, a chunk, a temperature that starts at 8,192: a check of a few
dozen tokens would never reach them.  With the number lowered, the same code of the model and the
same weights compute all of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from transformers import PreTrainedModel

from pagedserve.attention.backend import AttentionBackend

# So low that a check has several windows and chunks; blocks may not be larger.
_LOWERED: Final = 8

# Names in modules and configs.
_NAMES: Final = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "floor_scale",
    "index_topk",
)


@contextmanager
def lowered_thresholds(model: PreTrainedModel, backend: AttentionBackend) -> Iterator[bool]:
    """A context in which the model's thresholds are lowered; yields whether it has any."""
    lowered = max(_LOWERED, backend.min_block_size)
    places = [
        (holder, name)
        for holder, names in _holders(model)
        for name in names
        if type(holder.get(name)) is int and holder[name] > lowered
    ]
    values = [holder[name] for holder, name in places]
    for holder, name in places:
        holder[name] = lowered
    try:
        yield bool(places)
    finally:
        for (holder, name), value in zip(places, values, strict=True):
            holder[name] = value


def _holders(model: PreTrainedModel) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Attributes of modules and configs, each once, and the names to look for among them."""
    configs: list[Any] = [model.config, model.config.get_text_config()]
    configs += [module.config for module in model.modules() if hasattr(module, "config")]
    for config in {id(config): config for config in configs}.values():
        yield vars(config), _NAMES
        rope = getattr(config, "rope_parameters", None) or {}
        if "llama_4_scaling_beta" in rope:  # a temperature from there on
            yield rope, ("original_max_position_embeddings",)
    for module in model.modules():
        yield vars(module), _NAMES

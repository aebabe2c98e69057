"""Sharding plan of a model: transformers' plan for its architecture, read as data.

A plan maps names of modules and parameters, with a star for the number of a layer, to styles.
Models are refused before their weights are read if there is no plan, if heads cannot be split, or
if a plan replicates most of the layers.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.errors import UnsupportedModelError

# Styles whose parameters are split; others are replicated.
_SPLITTING: Final = frozenset(
    {
        "colwise",
        "colwise_gather_output",
        "colwise_rep",
        "rowwise",
        "rowwise_rep",
        "rowwise_split_input",
        "packed_colwise",
        "packed_rowwise",
        "embedding_rowwise",
        "embedding_colwise",
    }
)
# Styles of a decoder layer with cross-attention, as in Bart, Marian and Whisper, for which
# transformers has no plan.
_CROSS_LAYER: Final = {
    **{
        f"{attention}.{projection}": "rowwise" if projection == "out_proj" else "colwise"
        for attention in ("self_attn", "encoder_attn")
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj")
    },
    "fc1": "colwise",
    "fc2": "rowwise",
}
# Minimum split fraction of layers' bytes; norms, routers and few KV heads are replicated.
_LEAST_SPLIT: Final = 0.75
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Sharding plan of a model.

    Attributes:
        size: Number of ranks.
        styles: Styles by the names of modules and parameters, stars for numbers.
        overrides: Styles that differ from transformers'.
        is_own: Whether transformers has no plan, and the styles are ours.
        kv_heads: Number of KV heads if lower than that of ranks, so that some are replicated; else
            0.
    """

    size: int
    styles: dict[str, str]
    overrides: dict[str, str] = field(default_factory=dict)
    kv_heads: int = 0
    is_own: bool = False

    def style_of(self, name: str) -> str | None:
        """Style of a module or parameter by its name; None if the plan has none."""
        return self.styles.get(starred(name))

    @property
    def given(self) -> dict[str, str]:
        """Styles that transformers' plan does not have."""
        return self.styles if self.is_own else self.overrides


def starred(name: str) -> str:
    """Replace each number in a name by a star."""
    return _NUMBER.sub("*", name)


def read_plan(auto_class: Any, config: PreTrainedConfig, size: int) -> ShardPlan:
    """Read the plan of an architecture for a number of ranks.

    Args:
        auto_class: Class that creates the model.
        config: Config of the model.
        size: Number of ranks, at least 2.

    Raises:
        UnsupportedModelError: It cannot be split among that many ranks; gives the reason.
    """
    with torch.device("meta"):
        model: PreTrainedModel = auto_class.from_config(config)
    name = type(model).__name__
    styles = dict(getattr(model, "tp_plan", None) or {})
    is_own = not styles
    if is_own:
        styles = _cross_plan(model)
    if not styles:
        raise _refusal(name, size, "transformers has no plan for splitting it")
    num_heads, kv_heads = _heads(config)
    if num_heads % size:
        accepted = [number for number in range(1, num_heads + 1) if num_heads % number == 0]
        shown = ", ".join(map(str, accepted))
        raise _refusal(name, size, f"it has {num_heads} attention heads: give one of {shown}")
    overrides: dict[str, str] = {}
    if kv_heads % size:
        if size % kv_heads:
            raise _refusal(
                name, size, f"its {kv_heads} KV heads can be neither split nor repeated evenly"
            )
        overrides = {
            rule: "replicate"
            for rule, style in styles.items()
            if style == "colwise" and rule.rpartition(".")[2] in ("k_proj", "v_proj")
        }
        if not overrides:
            raise _refusal(name, size, f"it has {kv_heads} KV heads, packed with its queries")
    kv_heads = kv_heads if overrides else 0
    plan = ShardPlan(size, styles | overrides, overrides, kv_heads, is_own=is_own)
    share = _split_share(model, plan)
    if share < _LEAST_SPLIT:
        raise _refusal(
            name,
            size,
            f"transformers' plan splits {share:.0%} of its layers' weights, and every rank would "
            "have the rest",
        )
    return plan


def _cross_plan(model: PreTrainedModel) -> dict[str, str]:
    """Styles for the decoder of an encoder-decoder; empty for other layers than `_CROSS_LAYER`."""
    styles = {f"model.decoder.layers.*.{name}": style for name, style in _CROSS_LAYER.items()}
    names = {starred(name) for name, _ in model.named_modules()}
    return styles if styles.keys() <= names else {}


def _heads(config: Any) -> tuple[int, int]:
    """Query and KV heads of a layer; of an encoder-decoder those of its decoder."""
    if config.is_encoder_decoder and hasattr(config, "decoder_attention_heads"):
        return config.decoder_attention_heads, config.decoder_attention_heads
    text_config = config.get_text_config()
    num_heads = int(text_config.num_attention_heads)
    return num_heads, int(getattr(text_config, "num_key_value_heads", None) or num_heads)


def _split_share(model: PreTrainedModel, plan: ShardPlan) -> float:
    """Fraction of the bytes of the decoder's layers that is split, or replicated by necessity.

    An encoder beside it is not counted: one rank encodes images and prompts for all.
    """
    split = total = 0
    decoder: Any = model.get_decoder()
    inside = {id(parameter) for parameter in decoder.parameters()}
    for name, parameter in model.named_parameters():
        if _NUMBER.search(name) is None or id(parameter) not in inside:
            continue
        module = name.rpartition(".")[0]
        style = plan.style_of(name) or plan.style_of(module)
        total += parameter.nbytes
        if style in _SPLITTING or starred(module) in plan.overrides:
            split += parameter.nbytes
    return split / total if total else 0.0


def _refusal(name: str, size: int, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"tensor_parallel_size is {size}, and {name} cannot be: {reason}")

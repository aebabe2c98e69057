"""Baichuan and Baichuan 2, of 7B and 13B: Llama with a fused matrix for queries, keys and values.

Their configs do not define the other differences, their sizes do: 40 heads (13B) have ALiBi and no
rotary embedding, a vocabulary of 125,696 (Baichuan 2) has a head whose rows have length 1.
"""

from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from pagedserve.models.families.alibi import alibi_slopes

_ALIBI_HEADS: Final = 40
_NORM_HEAD_VOCAB: Final = 125_696


class BaichuanConfig(LlamaConfig):
    """Config of Baichuan."""

    model_type = "baichuan"
    attribute_map: ClassVar[dict[str, str]] = {"model_max_length": "max_position_embeddings"}


class BaichuanAttention(LlamaAttention):
    """Attention with ALiBi: slopes for a function that supports them, else a mask."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Map hidden states ``[1, T, F]`` to the same; return also the weights, if any."""
        slopes = alibi_slopes(self.config.num_attention_heads, hidden_states.device)
        if attention_mask is not None:
            distances = torch.arange(1 - attention_mask.shape[-1], 1, device=slopes.device)
            attention_mask = attention_mask + slopes[:, None, None] * distances
        kwargs["alibi_slopes"] = slopes
        return super().forward(
            hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
        )


class BaichuanDecoderLayer(LlamaDecoderLayer):
    """Llama's decoder layer with the attention above."""

    def __init__(self, config: BaichuanConfig, layer_idx: int) -> None:
        """Create layer number ``layer_idx``."""
        super().__init__(config, layer_idx)
        self.self_attn = BaichuanAttention(config, layer_idx)


class NoRotary(nn.Module):
    """A rotary embedding that rotates nothing."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Cosine and sine of every position and dimension, ``[1, 1, 1]``."""
        return x.new_ones(1, 1, 1), x.new_zeros(1, 1, 1)


class BaichuanForCausalLM(LlamaForCausalLM):
    """Llama's model, with the layers above for 40 heads."""

    config: BaichuanConfig

    def __init__(self, config: BaichuanConfig) -> None:
        """Create the model for the sizes in the config."""
        super().__init__(config)
        if config.num_attention_heads == _ALIBI_HEADS:
            self.model.layers = nn.ModuleList(
                BaichuanDecoderLayer(config, index) for index in range(config.num_hidden_layers)
            )
            self.model.rotary_emb = NoRotary()
            cast(Any, self).post_init()


class NormalizeHead(ConversionOps):
    """Normalizes the rows of the head of Baichuan 2, which its original code does in every step."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],  # noqa: ARG002  # required by transformers
        target_patterns: list[str],  # noqa: ARG002
        **kwargs: Any,
    ) -> dict[str, list[Tensor]]:
        """Return the weights by name, rows normalized if ``config`` is for Baichuan 2."""
        if kwargs["config"].vocab_size != _NORM_HEAD_VOCAB:
            return input_dict
        return {
            name: [functional.normalize(weight.float()).to(weight.dtype) for weight in weights]
            for name, weights in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """A normalized head is saved unchanged."""
        return self


def register() -> None:
    """Register these classes with transformers; idempotent."""
    AutoConfig.register(BaichuanConfig.model_type, BaichuanConfig, exist_ok=True)
    AutoModelForCausalLM.register(BaichuanConfig, BaichuanForCausalLM, exist_ok=True)
    projections = [f"self_attn.{name}_proj" for name in "qkv"]
    register_checkpoint_conversion_mapping(
        BaichuanConfig.model_type,
        [
            WeightConverter("self_attn.W_pack", projections, [Chunk(dim=0)]),
            WeightConverter("lm_head.weight", "lm_head.weight", [NormalizeHead()]),
        ],
        overwrite=True,
    )

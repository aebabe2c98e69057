"""Models with a vision encoder ("tower") beside their language model, whose attention is paged."""

from typing import Any, Final

from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.inputs.images import TEXT_ALONE

# Their images are rows of embeddings in the prompt, with causal attention.
_FAMILIES: Final = frozenset(("idefics3", "llava", "qwen2_5_vl", "qwen2_vl", "smolvlm"))
# Their images use bidirectional attention.
_BIDIRECTIONAL: Final = frozenset(("gemma3", "gemma3n", "gemma4", "gemma4_unified"))


def has_tower(config: PreTrainedConfig) -> bool:
    """Whether a model is loaded with its vision encoder, to accept images."""
    return config.model_type in _FAMILIES


def why_no_images(config: PreTrainedConfig) -> str | None:
    """Why prompts may not have images; None for a model that may accept them."""
    if config.model_type in _BIDIRECTIONAL:
        return (
            f"images of {config.model_type} see each other in both directions, which is not "
            "supported yet: the model takes text alone here"
        )
    return None if has_tower(config) else TEXT_ALONE


def attending_part(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model whose attention is paged: all of it, or all but its vision encoder."""
    whole: Any = model
    part: PreTrainedModel = whole.get_decoder() if has_tower(model.config) else model
    return part


def attention_by_part(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """Attention implementation for transformers, which leaves a vision encoder's unchanged."""
    return {"text_config": attention} if has_tower(config) else attention

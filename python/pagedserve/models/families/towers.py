"""Models with a vision encoder ("tower") beside their language model, whose attention is paged."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.inputs.images import TEXT_ALONE
from pagedserve.models.families.table import family_of


def has_tower(config: PreTrainedConfig) -> bool:
    """Whether a model is loaded with its vision encoder, to accept images."""
    return family_of(config.model_type).images == "causal"


def why_no_images(config: PreTrainedConfig) -> str | None:
    """Why prompts may not have images; None for a model that may accept them."""
    if family_of(config.model_type).images == "bidirectional":
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

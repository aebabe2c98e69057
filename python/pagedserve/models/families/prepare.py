"""Preparation of a model of transformers for paged attention, by its family.

Changes are made to the loaded instance, never to its class.  Attention and positions are changed
only while the model uses our attention function: with its original attention it stays as
transformers built it, so that the check at load can compare with it.
"""

from importlib import import_module

from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.models.attention_function import ATTENTION_NAME
from pagedserve.models.families.chunks import pass_chunks
from pagedserve.models.families.own_attention import replace_attention
from pagedserve.models.families.positions import embed_given_positions, shift_positions
from pagedserve.models.families.rope import fix_rope
from pagedserve.models.families.states import replace_mixers
from pagedserve.models.families.table import family_of
from pagedserve.models.families.towers import has_tower


def register_classes(model_type: str | None) -> None:
    """Register the classes of a family that transformers lacks; does nothing for others."""
    if name := family_of(model_type).classes:
        import_module(f"pagedserve.models.families.{name}").register()


def attention_to_build_with(config: PreTrainedConfig) -> str | dict[str, str]:
    """Attention implementation that a model must be created with before changes.

    That of a vision encoder stays transformers' own.
    """
    name = "eager" if family_of(config.model_type).attention else ATTENTION_NAME
    return {"text_config": name} if has_tower(config) else name


def prepare_model(model: PreTrainedModel, max_model_len: int) -> None:
    """Change the model as required; from now on it uses our attention function.

    Args:
        model: Model that was created with `attention_to_build_with`.
        max_model_len: Maximum sequence length, in tokens.

    Raises:
        UnsupportedModelError: Its config requires something that transformers does not compute.
    """
    family = family_of(model.config.model_type)
    if family.attention is not None:
        replace_attention(model, family.attention)
    if family.positions == "counted":
        embed_given_positions(model)
    shift_positions(model, family.first_position(model.config))
    if family_of(model.config.get_text_config().model_type).has_chunks:
        pass_chunks(model)
    replace_mixers(model)
    fix_rope(model, max_model_len)

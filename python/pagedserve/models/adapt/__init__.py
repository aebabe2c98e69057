"""Some architectures need a part of theirs exchanged before paged attention can run them.

Parts of the loaded instance are exchanged, never of its class, and only while the model attends
through our function: with its own attention it stays what transformers made of it, so that the
probe compares with that.
"""

from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.attention.interface import ATTENTION_NAME
from pagedserve.models.adapt.attention import attends_by_itself, hand_over_attention
from pagedserve.models.adapt.positions import hand_over_positions


def attention_to_build_with(config: PreTrainedConfig) -> str:
    """The name of the attention that a model must be made with before it is adapted."""
    return "eager" if attends_by_itself(config) else ATTENTION_NAME


def adapt(model: PreTrainedModel) -> None:
    """Exchange what must be exchanged; from now on the model attends through our function.

    Raises:
        UnsupportedModelError: if its config asks for what transformers does not compute.
    """
    hand_over_attention(model)
    hand_over_positions(model)

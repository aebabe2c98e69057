"""Some architectures need a part of theirs exchanged before paged attention can run them.

Parts of the loaded instance are exchanged, never of its class.  Its attention and positions are
exchanged only while it attends through our function: with its own attention it stays what
transformers made of it, so that the probe compares with that.
"""

from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.attention.interface import ATTENTION_NAME
from pagedserve.models.architectures.attention import attends_by_itself, hand_over_attention
from pagedserve.models.architectures.llama4 import hand_over_chunks
from pagedserve.models.architectures.positions import hand_over_positions
from pagedserve.models.architectures.rope import fix_rope
from pagedserve.models.architectures.states import hand_over_states


def attention_to_build_with(config: PreTrainedConfig) -> str:
    """The name of the attention that a model must be made with before it is adapted."""
    return "eager" if attends_by_itself(config) else ATTENTION_NAME


def prepare_architecture(model: PreTrainedModel, max_model_len: int) -> None:
    """Exchange what must be exchanged; from now on the model attends through our function.

    Args:
        model: made with `attention_to_build_with`.
        max_model_len: the longest sequence that it will see, in tokens.

    Raises:
        UnsupportedModelError: if its config asks for what transformers does not compute.
    """
    hand_over_attention(model)
    hand_over_positions(model)
    hand_over_chunks(model)
    hand_over_states(model)
    fix_rope(model, max_model_len)

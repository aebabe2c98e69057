"""Architectures that need some modules changed before paged attention can run them.

Changes are made to the loaded instance, never to its class.  Attention and positions are changed
only while the model uses our attention function: with its original attention it stays as
transformers built it, so that the probe can compare with it.
"""

from transformers import PreTrainedConfig, PreTrainedModel

from pagedserve.models.architectures.attention import attends_by_itself, hand_over_attention
from pagedserve.models.architectures.llama4 import hand_over_chunks
from pagedserve.models.architectures.positions import hand_over_positions
from pagedserve.models.architectures.rope import fix_rope
from pagedserve.models.architectures.states import hand_over_states
from pagedserve.models.attention_function import ATTENTION_NAME


def attention_to_build_with(config: PreTrainedConfig) -> str:
    """Name of the attention implementation that a model must be created with before changes."""
    return "eager" if attends_by_itself(config) else ATTENTION_NAME


def prepare_architecture(model: PreTrainedModel, max_model_len: int) -> None:
    """Change the model as required; from now on it uses our attention function.

    Args:
        model: created with `attention_to_build_with`.
        max_model_len: maximum sequence length, in tokens.

    Raises:
        UnsupportedModelError: its config requires something that transformers does not compute.
    """
    hand_over_attention(model)
    hand_over_positions(model)
    hand_over_chunks(model)
    hand_over_states(model)
    fix_rope(model, max_model_len)

"""``DecoderConfig``: what a decoder model computes, whatever format its files have."""

from dataclasses import dataclass

from pagedserve.cache.layers import LayerShape
from pagedserve.models.families.record import DecoderFamily
from pagedserve.models.load.config_checks import check_positive
from pagedserve.models.rotary import Rope


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A decoder layer.

    Attributes:
        rope: Rotary embedding; None for none.
        window: Sliding window in tokens; None for full attention.
    """

    rope: Rope | None
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A linear layer from hidden states to logits.

    Attributes:
        num_outputs: Logits: of the vocabulary, or of classes; 0 for a model whose hidden states are
            pooled.
        is_tied: Whether it has the weights of the embedding.
        softcap: Cap of the logits; None for none.
        name: Name of its weights in safetensors files.
    """

    num_outputs: int
    is_tied: bool
    softcap: float | None = None
    name: str = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder model.

    Attributes:
        family: Its family.
        vocab_size: Rows of the embedding.
        hidden_size: Hidden features F.
        inner_size: Inner features of the MLP.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Size of a head.
        epsilon: Epsilon of all norms.
        scale: Factor of the scores.
        score_softcap: Cap of the scores; None for none.
        has_qkv_bias: Whether query, key and value projections have biases.
        has_output_bias: Whether the output projection has one.
        head: What follows the last norm.
        max_positions: Maximum tokens of a sequence; None if the files do not say.
        max_positions_reason: The same as text.
        eos_token_id: Tokens that end a sequence, as in the files.
        layers: The layers.
    """

    family: DecoderFamily
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    epsilon: float
    scale: float
    score_softcap: float | None
    has_qkv_bias: bool
    has_output_bias: bool
    head: Head
    max_positions: int | None
    max_positions_reason: str
    eos_token_id: object
    layers: tuple[LayerConfig, ...]

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Keys and values of each layer."""
        heads, size = self.num_kv_heads, self.head_size
        return tuple(
            LayerShape(num_kv_heads=heads, key_size=size, value_size=size, window=layer.window)
            for layer in self.layers
        )

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: Names the first one that no model can have.
        """
        check_positive(
            {
                "the epsilon of its norms": self.epsilon,
                "attn_logit_softcapping": self.score_softcap,
                "final_logit_softcapping": self.head.softcap,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_size,
            }
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_kv_heads}; it must divide "
                f"num_attention_heads, {self.num_heads}"
            )

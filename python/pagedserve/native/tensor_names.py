"""Names of a decoder's weights in both file formats, and their shapes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pagedserve.models.families.record import LayerPart
from pagedserve.native.config import DecoderConfig

_GGUF: Final[dict[LayerPart, str]] = {
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_norm": "attn_norm",
    "attention_output_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_output_norm": "post_ffw_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
}


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names in one format.

    Attributes:
        embedding: Embedding.
        norm: Norm after the last layer.
        head: Output embedding.
    """

    embedding: str
    norm: str
    head: str
    _layer: str
    _parts: Mapping[LayerPart, str]

    def of_layer(self, layer: int, part: LayerPart, kind: str = "weight") -> str:
        """Name of the weight, or of another ``kind``, of a part of a layer."""
        return f"{self._layer}.{layer}.{self._parts[part]}.{kind}"


GGUF_NAMES: Final = TensorNames(
    "token_embd.weight", "output_norm.weight", "output.weight", "blk", _GGUF
)


def safetensors_names(config: DecoderConfig, base: str = "model.") -> TensorNames:
    """Names in safetensors files, as transformers saves them.

    Args:
        config: The model.
        base: Prefix of the weights before the head; files of a model without one have none.
    """
    return TensorNames(
        f"{base}embed_tokens.weight",
        f"{base}norm.weight",
        config.head.name,
        f"{base}layers",
        config.family.modules,
    )


def shapes_of(config: DecoderConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by name; without the head if it is the embedding, or there is none."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        names.embedding: (vocabulary, hidden),
        names.norm: (hidden,),
    }
    if config.head.num_outputs and not config.head.is_tied:
        shapes[names.head] = (config.head.num_outputs, hidden)
    of_layer = list(_layer_shapes(config))
    for layer in range(len(config.layers)):
        shapes |= {names.of_layer(layer, part, kind): shape for part, kind, shape in of_layer}
    return shapes


def _layer_shapes(config: DecoderConfig) -> Iterator[tuple[LayerPart, str, tuple[int, ...]]]:
    """Parts of a layer, with the kind and the shape of each."""
    hidden, inner, size = config.hidden_size, config.inner_size, config.head_size
    heads, kv_heads = config.num_heads * size, config.num_kv_heads * size
    matrices: dict[LayerPart, tuple[int, int]] = {
        "query": (heads, hidden),
        "key": (kv_heads, hidden),
        "value": (kv_heads, hidden),
        "output": (hidden, heads),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    vectors: dict[LayerPart, int] = {"attention_norm": hidden, "mlp_norm": hidden}
    if config.family.has_output_norms:
        vectors |= {"attention_output_norm": hidden, "mlp_output_norm": hidden}
    if config.family.has_head_norms:
        vectors |= {"query_norm": size, "key_norm": size}
    biased: list[LayerPart] = ["query", "key", "value"] if config.has_qkv_bias else []
    biased += ["output"] if config.has_output_bias else []
    yield from ((part, "weight", shape) for part, shape in matrices.items())
    yield from ((part, "weight", (num,)) for part, num in vectors.items())
    yield from ((part, "bias", matrices[part][:1]) for part in biased)

"""``Family``: what is known of the models of one ``model_type``, as data.

A model of transformers that attends through its attention interface needs no record.  Records are
read without torch and transformers; code for them is chosen by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Gate: TypeAlias = Literal["silu", "gelu_tanh"]
# Computations of attention in `pagedserve.models.families.own_attention`.
AttentionCode: TypeAlias = Literal["bloom", "falcon", "gpt_neo", "gptj", "mpt", "openai", "xglm"]
LayerPart: TypeAlias = Literal[
    "query",
    "key",
    "value",
    "output",
    "gate",
    "up",
    "down",
    "attention_norm",
    "attention_output_norm",
    "mlp_norm",
    "mlp_output_norm",
    "query_norm",
    "key_norm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one ``model_type``.

    Attributes:
        model_type: Name in ``config.json``.
        classes: Module of this package with the family's classes, which transformers lacks; None
            for a family of transformers.
        attention: Computation for attention modules that do not use the attention interface; None
            for modules that do.
        has_chunks: Whether layers attend within chunks, and others scale queries by positions that
            they count along the batch.
        positions: Whether decoders use the positions they are given, count them along the batch, or
            begin after that of the padding token.
        ignores_long_rope: Whether rotary embeddings keep LongRoPE's set for short sequences.
        is_encoder_decoder: Whether the model is run with its encoder.
        images: Attention between the features of an image; None for models of text alone.
        keeps: Unsupported contents of its layers' cache; None if transformers' types of cache
            layers name them.
        gguf: Architecture in GGUF files; None without a separate one.
        gguf_tokenizer: Variant of SentencePiece's tokenizer in GGUF files.
        composes_text: Whether byte-level tokenizers in GGUF files normalize text to NFC.
    """

    model_type: str
    classes: str | None = None
    attention: AttentionCode | None = None
    has_chunks: bool = False
    positions: Literal["given", "counted", "after padding"] = "given"
    ignores_long_rope: bool = False
    is_encoder_decoder: bool = False
    images: Literal["causal", "bidirectional"] | None = None
    keeps: str | None = None
    gguf: str | None = None
    gguf_tokenizer: Literal["llama", "phi3", "gemma"] = "llama"
    composes_text: bool = False

    def first_position(self, config: Any) -> int:
        """Position of a sequence's first token in the model's table of positions."""
        return int(config.pad_token_id) + 1 if self.positions == "after padding" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily(Family):
    """A family whose decoder layers have Llama's structure; one call of Rust computes a layer.

    Attributes:
        name: Prefix of the names of its classes in transformers.
        modules: Linear layers and norms of a decoder layer, by their names below it.
        gate: Activation of the gated MLP.
        activations: Names of that activation in ``config.json``.
        has_biases: Whether query, key and value projections have biases; None is the config's
            ``attention_bias``, which is also that of the output.
        norm_offset: Added to the weights of norms.
        scales_embeddings: Whether embeddings are multiplied with the root of their size.
        windows: Layers with the sliding window, if the config does not list them: none, all, those
            from a number on, those without rotary embedding, or all but the last of each few.
        has_local_rope: Whether layers with the sliding window have a separate rotary base.
        interleaves: Whether GGUF files interleave the halves of query and key heads.
        num_layers_of_other_scale: Number of layers of the model that scales scores by its hidden
            features per head; the others use the size of a head.  None if the config names the
            scale in GGUF files too.
        defaults: Fields of ``config.json`` that may be absent.
        ignored: Fields of other families, which its class in transformers does not read.
        tokenizer_class: Its tokenizer in transformers where the files name none, without "Fast".
        fixes_tokenizer_class: Whether that class is used whatever the files name.
    """

    name: str
    modules: Mapping[LayerPart, str]
    gate: Gate = "silu"
    activations: tuple[str, ...] = ("silu", "swish")
    has_biases: bool | None = None
    norm_offset: float = 0.0
    scales_embeddings: bool = False
    windows: Literal["none", "all", "from a layer on", "unrotated", "all but the last"] = "none"
    has_local_rope: bool = False
    interleaves: bool = False
    num_layers_of_other_scale: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    tokenizer_class: str = "TokenizersBackend"
    fixes_tokenizer_class: bool = False

    @property
    def architecture(self) -> str:
        """Class with a head for text."""
        return f"{self.name}ForCausalLM"

    @property
    def has_output_norms(self) -> bool:
        """Whether the outputs of attention and MLP have norms."""
        return "attention_output_norm" in self.modules

    @property
    def has_head_norms(self) -> bool:
        """Whether query and key heads have norms."""
        return "query_norm" in self.modules

    def score_size(self, fields: Mapping[str, Any]) -> int | None:
        """Size whose root divides scores, of a config's fields; None if GGUF files name it."""
        if self.num_layers_of_other_scale is None:
            return None
        if fields.get("num_hidden_layers") != self.num_layers_of_other_scale:
            return int(fields["head_dim"])
        return int(fields["hidden_size"] // fields["num_attention_heads"])

"""The records of all families of which more is known than their ``model_type``."""

from functools import partial
from typing import Any, Final

from pagedserve.models.families.record import DecoderFamily, Family, LayerPart

_MODULES: Final[dict[LayerPart, str]] = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
_HEAD_NORMS: Final[dict[LayerPart, str]] = {
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
_FOUR_NORMS: Final[dict[LayerPart, str]] = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}

_CAPS: Final = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
_UNROTATED: Final = ("no_rope_layers", "no_rope_layer_interval")
_QWEN_DEFAULTS: Final[dict[str, Any]] = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GELU: Final = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_GEMMA_DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
_GEMMA_WINDOWS: Final[dict[str, Any]] = _GEMMA_DEFAULTS | {
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA: Final = partial(
    DecoderFamily,
    gate="gelu_tanh",
    activations=_GELU,
    norm_offset=1.0,
    scales_embeddings=True,
    gguf_tokenizer="gemma",
    tokenizer_class="GemmaTokenizer",
)

DECODERS: Final = (
    DecoderFamily(
        model_type="llama",
        name="Llama",
        gguf="llama",
        modules=_MODULES,
        interleaves=True,
        ignored=(*_CAPS, *_UNROTATED, "layer_types"),
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    ),
    DecoderFamily(
        model_type="mistral",  # with Llama's name in GGUF files
        name="Mistral",
        modules=_MODULES,
        has_biases=False,
        windows="all",
        ignored=(*_CAPS, *_UNROTATED),
        fixes_tokenizer_class=True,
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
    ),
    DecoderFamily(
        model_type="qwen2",
        name="Qwen2",
        gguf="qwen2",
        composes_text=True,
        modules=_MODULES,
        has_biases=True,
        windows="from a layer on",
        ignored=(*_CAPS, *_UNROTATED),
        tokenizer_class="Qwen2Tokenizer",
        fixes_tokenizer_class=True,
        defaults=_QWEN_DEFAULTS,
    ),
    DecoderFamily(
        model_type="qwen3",
        name="Qwen3",
        gguf="qwen3",
        composes_text=True,
        modules=_MODULES | _HEAD_NORMS,
        windows="from a layer on",
        ignored=(*_CAPS, *_UNROTATED),
        tokenizer_class="Qwen2Tokenizer",
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    ),
    DecoderFamily(
        model_type="smollm3",
        name="SmolLM3",
        gguf="smollm3",
        modules=_MODULES,
        windows="unrotated",
        interleaves=True,
        ignored=_CAPS,
        defaults={
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "eos_token_id": 128_001,
            "tie_word_embeddings": True,
        },
    ),
    _GEMMA(
        model_type="gemma",
        name="Gemma",
        gguf="gemma",
        modules=_MODULES,
        activations=(*_GELU, "gelu"),
        ignored=(*_CAPS, *_UNROTATED, "layer_types"),
        defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 16},
    ),
    _GEMMA(
        model_type="gemma2",
        name="Gemma2",
        gguf="gemma2",
        modules=_MODULES | _FOUR_NORMS,
        windows="all but the last",
        num_layers_of_other_scale=46,
        ignored=_UNROTATED,
        defaults=_GEMMA_WINDOWS
        | {
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    _GEMMA(
        model_type="gemma3_text",
        name="Gemma3",
        gguf="gemma3",
        modules=_MODULES | _FOUR_NORMS | _HEAD_NORMS,
        windows="all but the last",
        has_local_rope=True,
        num_layers_of_other_scale=62,
        ignored=(*_UNROTATED, "attn_logit_softcapping"),
        defaults=_GEMMA_WINDOWS
        | {
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
    ),
)


def _each(*model_types: str, **known: Any) -> tuple[Family, ...]:
    """Records of families of which the same is known."""
    return tuple(Family(model_type=model_type, **known) for model_type in model_types)


FAMILIES: Final[tuple[Family, ...]] = (
    *DECODERS,
    *_each("baichuan", classes="baichuan"),
    *_each("bloom", attention="bloom"),
    *_each("codegen", "gpt_neox_japanese", "gptj", attention="gptj"),
    *_each("falcon", attention="falcon"),
    *_each("gpt_neo", attention="gpt_neo"),
    *_each("mpt", attention="mpt"),
    *_each("openai-gpt", attention="openai"),
    *_each("xglm", attention="xglm"),
    *_each("llama4_text", has_chunks=True),
    *_each("phimoe", ignores_long_rope=True),
    *_each("deepseek_v4", keeps="compressed keys and values"),
    # Decoders, which their files have with an encoder or without.
    *_each("bigbird_pegasus", "blenderbot", "blenderbot-small", "plbart", positions="counted"),
    *_each(
        *("bart", "marian", "mbart", "pegasus", "whisper"),
        positions="counted",
        is_encoder_decoder=True,
    ),
    *_each("mt5", "t5", is_encoder_decoder=True),
    *_each(
        *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta"),
        *("xlm-roberta-xl", "xmod"),
        positions="after padding",
    ),
    *_each("idefics3", "llava", "qwen2_5_vl", "qwen2_vl", "smolvlm", images="causal"),
    *_each("gemma3", "gemma3n", "gemma4", "gemma4_unified", images="bidirectional"),
    *_each("phi3", gguf="phi3", gguf_tokenizer="phi3"),
    *_each("qwen2_moe", gguf="qwen2moe", composes_text=True),
    *_each("qwen3_moe", gguf="qwen3moe", composes_text=True),
)

_UNKNOWN: Final = Family(model_type="")
_BY_MODEL_TYPE: Final = {family.model_type: family for family in FAMILIES}
_BY_GGUF: Final = {family.gguf: family for family in FAMILIES if family.gguf is not None}


def family_of(model_type: str | None) -> Family:
    """Record of a ``model_type``; an empty one for a family that needs none."""
    return _BY_MODEL_TYPE.get(model_type or "", _UNKNOWN)


def family_of_gguf(architecture: str) -> Family:
    """Record of a GGUF file's architecture; an empty one for a family that needs none."""
    return _BY_GGUF.get(architecture, _UNKNOWN)

"""The families of decoder models whose every layer Rust computes."""

from collections.abc import Mapping
from typing import Any, Final

from pagedserve.native.choice import OTHER_BACKEND
from pagedserve.native.config import Family

# Suffix of a refusal of what only torch computes.

_GEMMA: Final[dict[str, Any]] = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
_GEMMA_3: Final[dict[str, Any]] = _GEMMA | {
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN: Final[dict[str, Any]] = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: Final = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        gguf="llama",
        has_biases=None,
        interleaves=True,
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        gguf=None,  # that of Llama
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        gguf="qwen2",
        has_biases=True,
        defaults=_QWEN,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        gguf="qwen3",
        has_biases=None,
        has_head_norms=True,
        defaults=_QWEN | {"head_dim": 128},
    ),
    Family(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        gguf="smollm3",
        has_biases=None,
        interleaves=True,
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
    Family(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        gguf="gemma",
        gate="gelu_tanh",
        has_biases=None,
        norm_offset=1.0,
        scales_embeddings=True,
        defaults=_GEMMA | {"num_key_value_heads": 16},
    ),
    Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        gguf="gemma2",
        gate="gelu_tanh",
        has_output_norms=True,
        has_biases=None,
        norm_offset=1.0,
        scales_embeddings=True,
        defaults=_GEMMA
        | {
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        gguf="gemma3",
        gate="gelu_tanh",
        has_output_norms=True,
        has_head_norms=True,
        has_biases=None,
        norm_offset=1.0,
        scales_embeddings=True,
        defaults=_GEMMA_3
        | {
            "num_key_value_heads": 4,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
    ),
)

_BY_MODEL_TYPE: Final = {family.model_type: family for family in FAMILIES}


class UnsupportedError(ValueError):
    """What the files describe is not supported by the native backend; says what is."""


def family_of(content: Mapping[str, Any]) -> Family:
    """Family of a ``config.json``.

    Raises:
        UnsupportedError: It is another one; lists those that are supported.
    """
    model_type = content.get("model_type")
    family = _BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    names = content.get("architectures") or [family and family.architecture]
    if family is None or family.architecture not in names:
        known = ", ".join(known.architecture for known in FAMILIES)
        architectures = ", ".join(str(name)[:80] for name in names if name) or "unnamed"
        raise UnsupportedError(
            f"architecture {architectures} (model_type {str(model_type)[:80]!r}) is not supported "
            f"by the native backend, which has {known}: {OTHER_BACKEND}"
        )
    return family

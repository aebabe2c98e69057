"""Tiny random models of every family of the native backend, in Hugging Face format."""

from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny import save_tokenizer

VOCAB_SIZE: Final = 97  # that of the tokenizer
WINDOW: Final = 24

_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3: Final = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR: Final = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_LOCAL: Final = {"rope_type": "default", "rope_theta": 10_000.0}
# Of each its type in transformers, and what is different from the sizes above.
DECODERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {}),
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, scaled rope": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 32}),
    "llama, linear rope": ("llama", {"rope_parameters": _LINEAR}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 24},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL},
        },
    ),
    "gemma3, no windows": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "layer_types": ["full_attention"] * 3,
            "final_logit_softcapping": 2.0,
        },
    ),
}


def save_decoder(
    directory: Path, name: str, dtype: torch.dtype = torch.float32, **fields: Any
) -> Path:
    """Save one of ``DECODERS``, or another type, with a tokenizer of numbered words; the directory.

    Further fields of the config override its own.
    """
    kind, different = DECODERS.get(name, (name, {}))
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **_SIZES | different | fields)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    cast(torch.nn.Module, model).to(dtype)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory

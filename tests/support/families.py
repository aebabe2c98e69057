"""Small random models of several architectures that ranks can share, in Hugging Face format.

Twelve heads over six KV heads: two ranks can share them and three.
"""

from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

_SIZES: Final = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Of each its type in transformers, and what is different from the sizes above.
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {}),
    "llama, tied, odd vocabulary": ("llama", {"vocab_size": 1001, "tie_word_embeddings": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 64}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 64}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 16, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "phi3": ("phi3", {}),
}


def save_family(directory: Path, name: str) -> Path:
    """Save one of ``FAMILIES`` with a tokenizer of numbered words; the directory."""
    kind, different = FAMILIES[name]
    sizes = _SIZES | different
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    words = {"<unk>": 0, **{f" w{index}": index for index in range(1, sizes["vocab_size"])}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.save_pretrained(directory)
    return directory

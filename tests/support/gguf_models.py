"""Tiny models in Hugging Face format, written as GGUF files the way llama.cpp converts them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

_ARCHITECTURES: Final = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
_INTERLEAVED: Final = ("llama", "smollm3")


def _interleave(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    heads = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return heads.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    directory: Path,
    path: Path,
    storage: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    divisors: NDArray[np.float32] | None = None,
    storages: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write the model of a directory.

    Args:
        directory: The model.
        path: The file.
        storage: Type of its matrices.
        divisors: Divisors of the rotary frequencies.
        storages: Types of the matrices whose names contain these words.
    """
    config = json.loads((directory / "config.json").read_text())
    kind = config["model_type"]
    architecture = _ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_sizes(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, weights in load_file(directory / "model.safetensors").items():
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name and kind in _INTERLEAVED:
                weights = _interleave(weights, config[heads])  # noqa: PLW2901
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            weights = weights + 1  # noqa: PLW2901
        named = (kind for word, kind in (storages or {}).items() if word in name)
        stored = next(named, storage) if weights.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            str(names.get_name(name, try_suffixes=(".weight", ".bias"))),
            gguf.quants.quantize(np.ascontiguousarray(weights), stored),
            raw_dtype=stored,
        )
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    if config["model_type"] in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config["sliding_window"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])

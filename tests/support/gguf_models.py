"""Tiny models in Hugging Face format, written as GGUF files the way llama.cpp converts them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_ARCHITECTURES: Final = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
}
_INTERLEAVED: Final = ("llama", "smollm3")
_NORMS_FROM_ONE: Final = ("gemma", "gemma2", "gemma3_text")
_SCALINGS: Final = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
# As many tokens as the models of `tests.support.decoders` have, in a file's fields.
VOCABULARY: Final[dict[str, Any]] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *map(chr, range(33, 126)), "ab"],
    "tokenizer.ggml.merges": ["a b"],
}
# End tokens in all ways in which a file has them, beside the end-of-sequence token 2.
END_FIELDS: Final[dict[str, Any]] = {
    "tokenizer.ggml.eot_token_id": 5,
    "tokenizer.ggml.eom_token_id": 2,
    "tokenizer.ggml.eos_token_ids": [2, 8],
    "tokenizer.ggml.tokens": [
        {7: "<end_of_turn>", 9: "<|im_end|>"}.get(index, token)
        for index, token in enumerate(VOCABULARY["tokenizer.ggml.tokens"])
    ],
}
END_TOKENS: Final = (2, 5, 8, 7, 9)


def _interleave(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    heads = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return heads.swapaxes(1, 2).reshape(weights.shape)


def stored_rows(weights: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """Matrix as a file stores it; IQ4_NL, which the gguf package only reads, by nearest numbers."""
    if kind is not gguf.GGMLQuantizationType.IQ4_NL:
        rows: NDArray[Any] = gguf.quants.quantize(weights, kind)
        return rows
    groups = weights.reshape(-1, 32)
    peaks = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    scales = (peaks / -127).astype(np.float16)
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)
    table = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    places = np.abs(groups[..., None] / divisors[..., None] - table).argmin(axis=-1)
    numbers = (places[:, :16] | places[:, 16:] << 4).astype(np.uint8)
    blocks: NDArray[np.uint8] = np.concatenate([scales.view(np.uint8), numbers], axis=1)
    return blocks.reshape(len(weights), -1)


def write_gguf(
    directory: Path,
    path: Path,
    storage: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    divisors: NDArray[np.float32] | None = None,
    storages: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    *,
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model of a directory.

    Args:
        directory: The model.
        path: The file.
        storage: Type of its matrices.
        divisors: Divisors of the rotary frequencies.
        storages: Types of the matrices whose names contain these words.
        tensors: Further tensors.
        fields: Further fields.
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
        if kind in _NORMS_FROM_ONE and name.endswith("norm.weight"):
            weights = weights + 1  # noqa: PLW2901
        listed = (kind for word, kind in (storages or {}).items() if word in name)
        stored = next(listed, storage) if weights.ndim > 1 else gguf.GGMLQuantizationType.F32
        named = f"{name}.weight" if name.endswith("layer_scalar") else name
        writer.add_tensor(
            str(names.get_name(named, try_suffixes=(".weight", ".bias"))),
            stored_rows(np.ascontiguousarray(weights), stored),
            raw_dtype=stored,
        )
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, numbers)
    for name, value in (fields or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
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
        if "sliding_attention" in config["layer_types"]:
            writer.add_sliding_window(config["sliding_window"])
        if config["final_logit_softcapping"] is not None:
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "gemma4_text":
        _write_layers(writer, config)
    if (scaling := _SCALINGS.get(rope["rope_type"])) is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(rope["factor"])
        if scaling is gguf.RopeScalingType.YARN:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_layers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What layers have of their own, as ``Gemma4Model`` of convert_hf_to_gguf.py writes it."""
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    num_own = len(windows) - config["num_kv_shared_layers"]
    full = config["per_layer_config"][str(windows.index(False))]
    replaced = {"attention.key_length": full["head_dim"]}
    if config["use_double_wide_mlp"]:
        sizes = [config["intermediate_size"] << (layer >= num_own) for layer in range(len(windows))]
        replaced["feed_forward_length"] = sizes
    if "num_key_value_heads" in full:
        heads = (full["num_key_value_heads"], config["num_key_value_heads"])
        replaced["attention.head_count_kv"] = [heads[is_window] for is_window in windows]
    for name, value in replaced.items():
        del writer.kv_data[0][f"gemma4.{name}"]
        writer.add_key_value(f"gemma4.{name}", value, gguf.GGUFValueType.get_type(value))
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windows)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])


def rope_divisors(directory: Path) -> NDArray[np.float32]:
    """Divisors of the rotary frequencies, as llama.cpp writes them for a model of Llama 3's."""
    config = AutoConfig.from_pretrained(directory)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    exponents = np.arange(len(scaled), dtype=np.float32) / len(scaled)
    plain = 1 / np.float32(config.rope_parameters["rope_theta"]) ** exponents
    divisors: NDArray[np.float32] = (plain / scaled).astype(np.float32)
    return divisors

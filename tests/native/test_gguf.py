"""GGUF files of every family, written as llama.cpp does, against transformers' logits."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.native.load import load_native
from tests.support.decoders import VOCAB_SIZE, save_decoder
from tests.support.gguf_models import (
    END_FIELDS,
    END_TOKENS,
    rope_divisors,
    stored_rows,
    write_gguf,
)
from tests.support.native import logits_of

TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 80, np.int32)
# What a GGUF file has no field for.
FIXED: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {
        "num_hidden_layers": 7,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 32,
        "rope_parameters": None,
    },
}


def check_logits(directory: Path, path: Path, max_model_len: int = 256) -> None:
    """The logits of the file are those of the directory."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(TOKENS)[None].long()).logits[0].numpy()
    loaded = load_native(EngineArgs(str(path), backend="native"))
    found = logits_of(loaded, TOKENS, 40)
    assert loaded.eos_token_ids == (2,)
    assert loaded.max_model_len == max_model_len
    assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama, tied, biases",
        "llama, linear rope",
        "qwen2",
        "qwen3",
        "smollm3",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3, no windows",
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    directory = save_decoder(tmp_path, name, **FIXED.get(name, {}))
    max_model_len = 4 * 256 if name == "llama, linear rope" else 256
    check_logits(directory, write_gguf(directory, tmp_path / "model.gguf"), max_model_len)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_linear_scaling_needs_no_type(tmp_path: Path, key: str) -> None:
    plain = {"rope_type": "default", "rope_theta": 500.0}
    directory = save_decoder(tmp_path, "llama", rope_parameters=plain)
    path = write_gguf(directory, tmp_path / "model.gguf", fields={f"llama.{key}": 4.0})
    save_decoder(tmp_path, "llama, linear rope")  # the same weights
    check_logits(directory, path, 4 * 256)


def test_each_end_token_ends_a_sequence(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama")
    path = write_gguf(directory, tmp_path / "model.gguf", fields=END_FIELDS)
    assert load_native(EngineArgs(str(path), backend="native")).eos_token_ids == END_TOKENS


def test_biases_of_an_mlp_are_refused_by_name(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama", mlp_bias=True)
    path = write_gguf(directory, tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="mlp_bias is True"):
        load_native(EngineArgs(str(path), backend="native"))


def test_frequencies_may_have_divisors(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama, scaled rope")
    path = write_gguf(directory, tmp_path / "model.gguf", divisors=rope_divisors(directory))
    check_logits(directory, path)


def test_norms_are_rounded_as_those_of_a_directory(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    directory = save_decoder(tmp_path, "gemma", torch_dtype="float32")
    weights = load_file(directory / "model.safetensors")
    for name in weights:
        if "norm" in name:  # added to 1, it would be lost in 16 bits
            weights[name] = np.full_like(weights[name], 0.0035)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    path = write_gguf(directory, tmp_path / "model.gguf")
    whole, one_file = (
        logits_of(
            load_native(EngineArgs(str(each), backend="native", dtype="bfloat16")), TOKENS, 40
        )
        for each in (directory, path)
    )
    assert np.abs(whole - one_file).max() <= 1e-4 * np.abs(whole).max()


@pytest.mark.parametrize("storage", ["F16", "BF16", "Q8_0", "IQ4_NL"])
def test_other_types_are_the_numbers_that_they_stand_for(tmp_path: Path, storage: str) -> None:
    kind = gguf.GGMLQuantizationType[storage]
    directory = save_decoder(tmp_path, "qwen3")
    path = write_gguf(directory, tmp_path / "model.gguf", kind)
    round_weights(directory, kind)
    check_logits(directory, path)


def round_weights(directory: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Quantize the matrices of a directory, and save what they stand for."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    for name, matrix in weights.items():
        if matrix.ndim > 1:
            stored = stored_rows(matrix, kind)
            weights[name] = gguf.quants.dequantize(stored, kind).reshape(matrix.shape)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

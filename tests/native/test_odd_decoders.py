"""Configs and files that are seldom, against transformers' logits: the native backend agrees."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, UnsupportedModelError
from pagedserve.native.load import load_native
from tests.support.decoders import VOCAB_SIZE, WINDOW, save_decoder
from tests.support.native import logits_of

TOKENS = np.random.default_rng(4).integers(0, VOCAB_SIZE, 80, np.int32)
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW}
# What a class of transformers does not read has no effect.
FOREIGN: dict[str, Any] = {
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "query_pre_attn_scalar": 3,
    "no_rope_layers": [0, 0, 1],
}
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "heads wider than their share": ("llama", {"head_dim": 24}),
    "heads narrower than their share": ("llama", {"head_dim": 8}),
    "as many KV heads": ("llama", {"num_key_value_heads": None}),
    "one KV head": ("qwen2", {"num_key_value_heads": 1}),
    "foreign fields": ("llama", {"sliding_window": 8, "layer_types": [SLIDING] * 3} | FOREIGN),
    "no window": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "foreign fields beside a window": ("mistral", {"sliding_window": WINDOW} | FOREIGN),
    "a pattern of Mistral": (
        "mistral",
        {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "a pattern of windows": ("qwen2", WINDOWS | {"layer_types": [SLIDING, FULL, SLIDING]}),
    "tied, biases, windows": (
        "qwen3",
        WINDOWS | {"attention_bias": True, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "layers without rotation": (
        "smollm3",
        WINDOWS | {"no_rope_layers": [1, 0, 0], "attention_bias": True},
    ),
    "untied": ("smollm3", {"tie_word_embeddings": False}),
    "biases": ("gemma", {"attention_bias": True, "tie_word_embeddings": False}),
    "foreign fields of Gemma": ("gemma", FOREIGN),
    "no caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "all windows": ("gemma2", {"layer_types": [SLIDING] * 3}),
    "a cap of logits": ("gemma3", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "default rotation": ("gemma3", {"rope_parameters": None, "layer_types": [FULL, SLIDING, FULL]}),
}


def check(directory: Path) -> None:
    """The logits of a directory are those of transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(TOKENS)[None].long()).logits[0].numpy()
    found = logits_of(load_native(EngineArgs(str(directory), backend="native")), TOKENS, 40)
    assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", ODD)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    kind, fields = ODD[name]
    check(save_decoder(tmp_path, kind, **fields))


def edit_config(directory: Path, **fields: Any) -> None:
    """Replace fields of a config; None removes one."""
    path = directory / "config.json"
    given = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in given.items() if value is not None}))


@pytest.mark.parametrize(
    ("name", "key"),
    [("llama", "type"), ("qwen2", "rope_type"), ("smollm3", "type"), ("gemma3", "rope_type")],
)
def test_rotation_may_be_given_in_the_older_fields(tmp_path: Path, name: str, key: str) -> None:
    directory = save_decoder(tmp_path, name)
    scaling = {key: "linear", "factor": 4.0}
    edit_config(directory, rope_parameters=None, rope_theta=700.0, rope_scaling=scaling)
    check(directory)


@pytest.mark.parametrize("name", ["llama, linear rope", "gemma3"])
def test_the_older_field_comes_before_the_newer(tmp_path: Path, name: str) -> None:
    directory = save_decoder(tmp_path, name)
    edit_config(directory, rope_scaling={"rope_type": "linear", "factor": 8.0})
    check(directory)
    edit_config(directory, rope_scaling={"rope_type": "yarn", "factor": 8.0})
    with pytest.raises(UnsupportedModelError, match="rope_type is 'yarn'"):
        load_native(EngineArgs(str(directory), backend="native"))


def test_parameters_of_no_kind_of_layers_are_not_read(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "gemma3")
    edit_config(directory, rope_parameters={"rope_type": "linear", "factor": 8.0})
    check(directory)


@pytest.mark.parametrize(("name", "limit"), [("llama, linear rope", 4 * 256), ("gemma3", 256)])
def test_linear_rotation_is_for_longer_sequences(tmp_path: Path, name: str, limit: int) -> None:
    directory = str(save_decoder(tmp_path, name))
    assert load_native(EngineArgs(directory, backend="native")).max_model_len == limit
    with pytest.raises(ConfigError, match=rf"max_model_len is {limit + 1}: .* up to {limit}, its"):
        load_native(EngineArgs(directory, backend="native", max_model_len=limit + 1))


def test_a_type_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "gemma3")
    scaling = {"type": "linear", "factor": 4.0}
    edit_config(directory, rope_parameters=None, rope_scaling=scaling)
    with pytest.raises(UnsupportedModelError, match=r"rope_scaling is .*give it as rope_type"):
        load_native(EngineArgs(str(directory), backend="native"))


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_other_rotations_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    directory = save_decoder(tmp_path, "llama")
    edit_config(directory, rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UnsupportedModelError, match=f"rope_type is '{kind}'.*backend='torch'"):
        load_native(EngineArgs(str(directory), backend="native"))


def test_a_tied_head_of_its_own_is_not_that_of_the_embedding(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama")
    edit_config(directory, tie_word_embeddings=True)
    check(directory)


def test_a_tied_head_may_be_in_the_files_too(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "gemma")
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})
    check(directory)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_files_may_be_shards(tmp_path: Path, stored: torch.dtype) -> None:
    directory = save_decoder(tmp_path / "whole", "qwen3", stored)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=stored)
    model.save_pretrained(tmp_path / "shards", max_shard_size="60kB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    check(tmp_path / "shards")

"""GGUF files: broken ones, and the converted copy."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from pagedserve import LLM
from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, UnsupportedModelError
from pagedserve.models.load.convert import cache_directory, check_gguf, converted_directory
from pagedserve.models.load.gguf_fields import complete_config
from pagedserve.models.load.gguf_header import read_header
from pagedserve.models.loader import LoadedModel, load_model
from tests.support.decoders import VOCAB_SIZE, save_decoder
from tests.support.gguf_models import (
    END_FIELDS,
    END_TOKENS,
    VOCABULARY,
    rope_divisors,
    write_gguf,
)
from tests.support.tokenizer_kinds import write_gguf as write_vocabulary


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Saves a model that is written as GGUF; converted copies are put beside it."""
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path / "cache"))
    return partial(save_decoder, tmp_path / "model")


@pytest.fixture
def gguf(save: Callable[..., Path], tmp_path: Path) -> Path:
    return write_gguf(save("llama"), tmp_path / "model.gguf", fields=VOCABULARY)


# Nothing, the magic number, half of the fields, half of the tensors' names, and of the data.
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.002, 0.006, 0.5, 0.999])
def test_a_file_cut_short_names_its_size(gguf: Path, tmp_path: Path, share: float) -> None:
    cut = tmp_path / "cut.gguf"
    size = int(gguf.stat().st_size * share)
    with gguf.open("rb") as file:
        cut.write_bytes(file.read(size))
    with pytest.raises(ModelLoadError, match=rf"cut short.*{size}|not a GGUF file"):
        check_gguf(cut)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("hello")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        check_gguf(path)


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_directory() == Path("/a")
    monkeypatch.delenv("PAGEDSERVE_CACHE")
    assert cache_directory() == Path("/b/pagedserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path("/c/.cache/pagedserve")


def test_a_failed_conversion_leaves_nothing(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModelLoadError("no")

    monkeypatch.setattr("pagedserve.models.load.convert._convert", fail)
    with pytest.raises(ModelLoadError):
        converted_directory(gguf)
    assert not list((tmp_path / "cache" / "converted").iterdir())


def test_a_conversion_is_made_once_and_known_by_its_file(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def convert(_: Path, directory: Path, *_others: object) -> None:
        calls.append(directory)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr("pagedserve.models.load.convert._convert", convert)
    link = tmp_path / "link.gguf"
    link.symlink_to(gguf)
    first = converted_directory(link)
    assert converted_directory(link) == first
    assert len(calls) == 1
    assert (first / "config.json").is_file()


def load(path: Path) -> LoadedModel:
    return load_model(EngineArgs(str(path), backend="torch"), torch.device("cpu"))


@pytest.mark.parametrize("backend", ["torch", "native", "auto"])
def test_missing_weights_are_named(save: Callable[..., Path], tmp_path: Path, backend: Any) -> None:
    directory = save("llama")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, directory / "model.safetensors")
    path = write_gguf(directory, tmp_path / "model.gguf", fields=VOCABULARY)
    named = r"blk\.1\.ffn_down" if backend == "native" else r"model\.layers\.1\.mlp\.down_proj"
    with pytest.raises(ModelLoadError, match=rf"lack 1 of .*the first is '{named}\.weight'"):
        LLM(str(path), backend=backend, use_tqdm_on_load=False)
    assert not list((tmp_path / "cache").glob("converted/*"))


@pytest.mark.parametrize("backend", ["torch", "native", "auto"])
def test_weights_that_are_not_read_are_named(
    save: Callable[..., Path], tmp_path: Path, backend: Any
) -> None:
    more = {"blk.1.attn_sub_norm.weight": np.ones(64, np.float32)}
    path = write_gguf(save("qwen2"), tmp_path / "model.gguf", tensors=more, fields=VOCABULARY)
    with pytest.raises(UnsupportedModelError, match=r"has 1 tensors.*'blk\.1\.attn_sub_norm\.weig"):
        LLM(str(path), backend=backend, use_tqdm_on_load=False)


@pytest.mark.parametrize("backend", ["torch", "native", "auto"])
def test_attention_in_both_directions_is_refused(
    save: Callable[..., Path], tmp_path: Path, backend: Any
) -> None:
    fields = VOCABULARY | {"llama.attention.causal": False}
    path = write_gguf(save("llama"), tmp_path / "model.gguf", fields=fields)
    refusal = "is_causal is False" if backend == "native" else "logits differ"
    with pytest.raises(UnsupportedModelError, match=refusal):
        LLM(str(path), backend=backend, use_tqdm_on_load=False)


def test_biases_are_those_of_the_file(
    save: Callable[..., Path], tmp_path: Path, assert_exact: Callable[..., None]
) -> None:
    directory = save("llama", attention_bias=True, mlp_bias=True)
    path = write_gguf(directory, tmp_path / "model.gguf", fields=VOCABULARY)
    assert_exact(load(path), directory)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
OTHERS = np.linspace(1, 8, 16, dtype=np.float32)  # divisors
# With what GGUF files have no field for as transformers takes it.
SCALED: dict[str, dict[str, Any]] = {
    "llama, linear rope": {},
    "gemma3": {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32},
    "gemma3, no windows": {},
    "qwen2": {"rope_parameters": YARN},
    "llama, scaled rope": {"rope_parameters": LLAMA3},
}


@pytest.mark.parametrize("name", SCALED)
def test_rotary_embeddings_are_scaled_as_the_file_says(
    save: Callable[..., Path], tmp_path: Path, assert_exact: Callable[..., None], name: str
) -> None:
    directory = save(name, **SCALED[name])
    divisors = rope_divisors(directory) if name == "llama, scaled rope" else None
    path = write_gguf(directory, tmp_path / "model.gguf", divisors=divisors, fields=VOCABULARY)
    assert_exact(load(path), directory)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"divisors": OTHERS}, "its rope_freqs.weight are not those of Llama 3"),
        ({"tensors": {"rope_factors_long.weight": OTHERS}}, "it has rope_factors_long and"),
        ({"fields": {"llama.rope.scaling.type": "longrope"}}, "scaling.type is 'longrope', which"),
    ],
)
def test_other_rotary_embeddings_are_refused_by_name(
    save: Callable[..., Path], tmp_path: Path, written: dict[str, Any], said: str
) -> None:
    directory = save("llama", head_dim=32)
    given = written | {"fields": VOCABULARY | written.get("fields", {})}
    with pytest.raises(ModelLoadError, match=f"{said}.*give the model's directory"):
        load(write_gguf(directory, tmp_path / "model.gguf", **given))


def test_each_end_token_ends_a_sequence(save: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf(save("llama"), tmp_path / "model.gguf", fields=VOCABULARY | END_FIELDS)
    assert load(path).eos_token_ids == END_TOKENS


def test_what_transformers_has_of_gemma4_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_vocabulary(path, "gemma4", "gemma4", eos_token_id=1, eot_token_id=106)
    config = AutoConfig.for_model("gemma4_text", eos_token_id=[1, 106, 50])
    known = deepcopy(config.rope_parameters)
    unrotated = np.array([1.0] * 64 + [1e30] * 192, np.float32)
    complete_config(config, read_header(path), unrotated)
    assert (config.rope_parameters, config.eos_token_id) == (known, [1, 106, 50])


# Fields in which the sizes of Gemma 4 differ.
INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
GEMMA4: dict[str, dict[str, Any]] = {
    "E2B": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, **INPUTS},
    "E4B": {"num_kv_shared_layers": 2, **INPUTS},
    "31B": {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
}


@pytest.mark.parametrize("name", GEMMA4)
def test_layers_of_gemma4_are_those_of_the_file(
    save: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    given = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 32,
        "global_head_dim": 64,
    }
    directory = save("gemma4_text", **given | GEMMA4[name])
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.layer_scalar"] /= 2
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    num_shared = GEMMA4[name].get("num_kv_shared_layers", 0)
    # Files have weights of keys for layers that reuse others' keys.
    unused = {
        f"blk.{4 - n}.attn_k.weight": np.ones((8, 8), np.float32) for n in range(1, num_shared)
    }
    path = write_gguf(directory, tmp_path / "model.gguf", tensors=unused, fields=VOCABULARY)
    copy = converted_directory(path)
    found = load_file(copy / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[weight], weights[weight]) for weight in weights)
    saved, read = (AutoConfig.from_pretrained(each).to_dict() for each in (directory, copy))
    for field in given.keys() | GEMMA4[name].keys() | {"per_layer_config"}:
        assert (name == "31B" and field.startswith("vocab")) or read.get(field) == saved.get(field)


@pytest.mark.parametrize(
    ("kind", "num_layers", "expected"),
    [("gemma2", 42, 128), ("gemma2", 46, 144), ("gemma3_text", 62, 144)],
)
def test_the_largest_models_scale_scores_by_their_features_per_head(
    tmp_path: Path, kind: str, num_layers: int, expected: int
) -> None:
    path = tmp_path / "model.gguf"
    write_vocabulary(path, kind.removesuffix("_text"), "llama")
    sizes = {"hidden_size": 4608, "num_attention_heads": 32, "head_dim": 128}
    config = AutoConfig.for_model(kind, num_hidden_layers=num_layers, **sizes)
    complete_config(config, read_header(path), None)
    assert config.query_pre_attn_scalar == expected


STARCODER2 = {"hidden_size": 64, "num_attention_heads": 4}


def test_the_rotary_base_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    sizes = {"rope_dimension_count": 16, "key_length": 16}
    write_vocabulary(path, "starcoder2", "gpt2", rope_freq_base=500.0, **sizes)
    config = AutoConfig.for_model("starcoder2", **STARCODER2)
    complete_config(config, read_header(path), None)
    assert config.rope_parameters["rope_theta"] == 500


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("rope_dimension_count", "rope.dimension_count is 8, not 16, which transformers"),
        ("key_length", "attention.key_length is 8, not 16, which transformers"),
    ],
)
def test_other_sizes_of_heads_are_refused_by_name(tmp_path: Path, field: str, said: str) -> None:
    path = tmp_path / "model.gguf"
    write_vocabulary(path, "starcoder2", "gpt2", **{field: 8})
    config = AutoConfig.for_model("starcoder2", **STARCODER2)
    with pytest.raises(ModelLoadError, match=said):
        complete_config(config, read_header(path), None)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_texts_of_llama_3_begin_with_the_first_token(
    save: Callable[..., Path], tmp_path: Path, backend: Any
) -> None:
    more = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 1}
    path = write_gguf(save("llama"), tmp_path / "model.gguf", fields=VOCABULARY | more)
    with LLM(str(path), backend=backend, use_tqdm_on_load=False) as llm:
        tokens = VOCABULARY["tokenizer.ggml.tokens"]
        assert llm.get_tokenizer()("ab").input_ids == [1, tokens.index("ab")]

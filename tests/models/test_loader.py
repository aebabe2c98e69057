"""Loading: what runs, what is refused by name, and what is said about broken files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LongT5Config, LongT5ForConditionalGeneration

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, ModelLoadError, UnsupportedModelError
from pagedserve.models.loader import LoadedModel, derive_dtype, load_model

SaveTiny = Callable[..., Path]
CPU = torch.device("cpu")
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
UNSCALED = {"rope_parameters": {"rope_type": "default"}}


def load(model: Path | str, **options: Any) -> LoadedModel:
    return load_model(EngineArgs(model=str(model), **options), CPU)


@pytest.mark.parametrize(
    ("model_type", "options", "windows"),
    [
        ("llama", {}, [None, None]),
        ("gpt2", {}, [None, None]),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, [None, None]),
        ("qwen3", {"head_dim": 8}, [None, None]),
        ("mistral", {"sliding_window": 8}, [8, 8]),
        ("gemma2", {"sliding_window": 8, "head_dim": 8}, [8, None]),
        ("gpt_oss", {"sliding_window": 8, "head_dim": 8, **MOE, **UNSCALED}, [8, None]),
        # Its window shows in the mask only.
        ("phimoe", {"sliding_window": 8, **MOE}, [8, 8]),
    ],
)
def test_architectures_that_run(
    save_tiny: SaveTiny, model_type: str, options: dict[str, Any], windows: list[int | None]
) -> None:
    loaded = load(save_tiny(model_type, **options))
    assert [layer.window for layer in loaded.layers] == windows
    assert loaded.num_layers == 2
    assert loaded.vocab_size == 97
    assert loaded.max_model_len == 64
    assert loaded.eos_token_ids == (2,)
    assert loaded.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"text_config": {"torch_dtype": "float16"}}, torch.float16),
        ({}, torch.float32),
    ],
)
def test_a_gpu_has_the_dtype_of_the_whole_model_or_of_its_text_part(
    tmp_path: Path, fields: dict[str, Any], expected: torch.dtype
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"} | fields))
    config, gpu = AutoConfig.from_pretrained(tmp_path), torch.device("cuda")
    assert derive_dtype(EngineArgs("any"), config, gpu) == expected
    assert derive_dtype(EngineArgs("any"), config, CPU) == torch.float32


def test_two_attention_calls_a_layer_have_a_pool_each(
    save_tiny: SaveTiny, assert_exact: Callable[..., None]
) -> None:
    directory = save_tiny("diffllama")
    loaded = load(directory)
    assert loaded.num_layers == 4
    assert_exact(loaded, directory)


def test_keys_and_values_of_different_sizes(save_tiny: SaveTiny) -> None:
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **MOE}
    heads = {"v_head_dim": 12, "head_dim": 8, "num_key_value_heads": 4}
    loaded = load(save_tiny("deepseek_v3", **latent, **experts, **heads))
    assert {(layer.key_size, layer.value_size) for layer in loaded.layers} == {(16, 12)}


@pytest.mark.parametrize(
    ("model_type", "options", "name"),
    [
        ("rwkv", {"attention_hidden_size": 16}, "RwkvForCausalLM"),  # no attention at all
        ("bert", {}, "BertLMHeadModel"),  # sees the future
    ],
)
def test_architectures_that_cannot_run_are_refused_by_name(
    save_tiny: SaveTiny, model_type: str, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        load(save_tiny(model_type, **options))


def test_an_encoder_decoder_is_refused(
    tmp_path: Path, save_tokenizer: Callable[[Path], None]
) -> None:
    config = LongT5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    LongT5ForConditionalGeneration(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"LongT5.*encoder-decoder"):
        load(tmp_path)


LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("model_type", "rope", "limit"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 64),
        ("phimoe", LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.0}, 16),
    ],
)
def test_rotary_that_depends_on_the_batch_is_capped(
    save_tiny: SaveTiny, model_type: str, rope: dict[str, Any], limit: int
) -> None:
    options = MOE if model_type == "phimoe" else {}
    directory = save_tiny(model_type, rope_parameters=rope, **options)
    assert load(directory).max_model_len == limit
    with pytest.raises(ConfigError, match=rf"{rope['rope_type']}.*{limit} tokens"):
        load(directory, max_model_len=limit + 1)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [("llama", {}), ("phi3", {"original_max_position_embeddings": 16})],
)
def test_a_longer_length_takes_the_long_set_of_longrope(
    save_tiny: SaveTiny,
    assert_exact: Callable[..., None],
    tmp_path: Path,
    model_type: str,
    options: dict[str, Any],
) -> None:
    directory = save_tiny(model_type, rope_parameters=LONGROPE, **options)
    assert load(directory).max_model_len == 16
    with pytest.raises(ConfigError, match=r"max_model_len is 65.*up to 64"):
        load(directory, max_model_len=65)
    # With the long set in the place of the short one, transformers takes it at any length.
    peer = shutil.copytree(directory, tmp_path / "peer")
    config = json.loads((peer / "config.json").read_text())
    config["rope_parameters"]["short_factor"] = LONGROPE["long_factor"]
    (peer / "config.json").write_text(json.dumps(config))
    assert_exact(load(directory, max_model_len=64), peer)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
YARN = LINEAR | {"rope_type": "yarn"}


@pytest.mark.parametrize(
    ("model_type", "rope", "limit"),
    [
        ("llama", LINEAR, 256),
        ("llama", YARN | {"original_max_position_embeddings": 32}, 128),
        # max_position_embeddings is the number after stretching.
        ("llama", YARN | {"original_max_position_embeddings": 16}, 64),
        (
            "gemma3_text",
            {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}},
            64,
        ),
    ],
)
def test_scaled_rotary_is_for_longer_sequences(
    save_tiny: SaveTiny, model_type: str, rope: dict[str, Any], limit: int
) -> None:
    directory = save_tiny(model_type, rope_parameters=rope)
    assert load(directory).max_model_len == limit
    with pytest.raises(ConfigError, match=rf"max_model_len is {limit + 1}.*up to {limit}, its"):
        load(directory, max_model_len=limit + 1)


def test_max_model_len_is_taken_or_refused(save_tiny: SaveTiny) -> None:
    directory = save_tiny("llama")
    assert load(directory, max_model_len=10).max_model_len == 10
    with pytest.raises(ConfigError, match=r"max_model_len is 65.*up to 64"):
        load(directory, max_model_len=65)


def test_eos_of_the_generation_config_comes_first(save_tiny: SaveTiny) -> None:
    directory = save_tiny("llama")
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load(directory).eos_token_ids == (5, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_request(save_tiny: SaveTiny, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    loaded = load(save_tiny("llama"), dtype=name, attention_backend="rust")
    assert (loaded.dtype, loaded.attention_backend.name) == (dtype, "rust")


def test_a_directory_without_weights(save_tiny: SaveTiny) -> None:
    directory = save_tiny("llama")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no weights.*safetensors"):
        load(directory)


def test_weights_cut_short(save_tiny: SaveTiny) -> None:
    directory = save_tiny("llama")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="weights cannot be loaded"):
        load(directory)


def test_missing_weights_are_not_replaced_by_random_ones(save_tiny: SaveTiny) -> None:
    directory = save_tiny("llama")
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"lack 9 .*model\.layers\.2"):
        load(directory)


def test_an_unknown_architecture(save_tiny: SaveTiny) -> None:
    directory = save_tiny("llama")
    path = directory / "config.json"
    path.write_text(json.dumps({"model_type": "no_such_thing"}))
    with pytest.raises(UnsupportedModelError, match="no_such_thing"):
        load(directory)


def test_an_unknown_name_asks_the_hub_once_and_does_not_wait_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    def model_info(_: Any, hub_id: str, *, timeout: float, **_others: Any) -> None:
        limits.append(timeout)
        raise OSError(f"{hub_id} cannot be reached")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(ModelLoadError, match=r"nobody/no-such-model.*reached.*accepted are"):
        load("nobody/no-such-model")
    (limit,) = limits
    assert 0 < limit <= 15

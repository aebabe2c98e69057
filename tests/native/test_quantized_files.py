"""GPTQ, AWQ and compressed-tensors files on the native backend, against their exact weights."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, ModelLoadError, UnsupportedModelError
from pagedserve.native.choice import choose_backend
from pagedserve.native.load import LoadedNative, load_native
from tests.native.test_bytes import TOKENS, check, round_rows
from tests.support.decoders import save_decoder
from tests.support.native import logits_of
from tests.support.quantized_models import AWQ, BYTES, GPTQ, PACKED, Scheme, write_quantized

QUERY = "model.layers.1.self_attn.q_proj."
WEIGHTS = "model.safetensors"
V2 = replace(GPTQ, layout=("checkpoint_format", "gptq_v2"))

ACTIVATIONS = {"type": "int", "num_bits": 8, "strategy": "token"}
WEIGHT_ONLY = replace(BYTES, quantizes_rows=False)

# Each scheme, and the storage of blocks of 32 of its weights, or of its rows.
SCHEMES: dict[str, tuple[Scheme, str]] = {
    "gptq": (GPTQ, "Q4_1"),
    "gptq, symmetric": (replace(GPTQ, is_symmetric=True), "Q4_0"),
    "gptq 2, whole rows": (replace(V2, group_size=None), "Q4_1"),
    "gptq, groups of 128": (replace(GPTQ, group_size=128), "Q4_1"),
    "gptq, a shorter last group": (replace(GPTQ, group_size=64), "Q4_1"),
    "gptq, 8 bits": (replace(GPTQ, bits=8, is_symmetric=True), "Q8_0"),
    "awq": (AWQ, "Q4_1"),
    "awq, whole rows": (replace(AWQ, group_size=None), "Q4_1"),
    "packed": (PACKED, "Q4_0"),
    "packed, zero points": (replace(PACKED, is_symmetric=False), "Q4_1"),
    "packed, 8 bits": (replace(PACKED, bits=8), "Q8_0"),
    "bytes": (BYTES, "I8_ROWS"),
    "bytes, weights alone": (WEIGHT_ONLY, "Q8_0"),
}
# Each scheme without blocks, and the reason that is logged.
DEQUANTISED: dict[str, tuple[Scheme, str]] = {
    "gptq, act-order": (replace(GPTQ, has_order=True), "32 adjacent inputs have several groups"),
    "packed, act-order": (replace(PACKED, has_order=True), "adjacent inputs have several groups"),
    "awq, groups of 16": (replace(AWQ, group_size=16), "32 adjacent inputs have several groups"),
    "bytes, zero points": (replace(BYTES, is_symmetric=False), "have 8 bits and zero points"),
    "packed, 8 bits, zero points": (
        replace(PACKED, bits=8, is_symmetric=False),
        "have 8 bits and zero points",
    ),
}


def saved(tmp_path: Path, scheme: Scheme, name: str = "llama", **options: Any) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the weights that its numbers stand for."""
    directory, dense = save_decoder(tmp_path / "quantized", name), tmp_path / "dense"
    write_quantized(directory, scheme, dense, **options)
    return directory, dense


def change_config(directory: Path, fields: dict[str, Any]) -> None:
    """Replace fields of the quantization config."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= fields
    file.write_text(json.dumps(config))


def load(directory: Path, quantization: Any, **options: Any) -> LoadedNative:
    return load_native(EngineArgs(str(directory), quantization=quantization, **options))


def row_group(scheme: Scheme, columns: int) -> int:
    """Inputs of a row that share a scale."""
    if scheme.bits == 8:
        return columns if scheme == BYTES else 32
    is_wide = columns % 64 == 0 and (scheme.group_size or columns) % 64 == 0
    return 64 if is_wide else 32


def row_bytes(scheme: Scheme, storage: str, columns: int) -> int:
    """Bytes of the weights of an output feature."""
    if storage == "I8_ROWS":
        return columns + 4
    num_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[storage]
    if row_group(scheme, columns) == 64:
        return columns // 64 * (num_bytes + 16)
    return columns // 32 * num_bytes


def weight_bytes(scheme: Scheme, storage: str) -> int:
    """Bytes of the weights of a model of `saved`."""
    of_hidden, of_gated = (row_bytes(scheme, storage, columns) for columns in (64, 96))
    quantized = 3 * ((64 + 2 * 32 + 64 + 2 * 96) * of_hidden + 64 * of_gated)
    return quantized + 4 * 64 * (2 * 128)  # embedding and head


def exact_logits(dense: Path, scheme: Scheme) -> NDArray[Any]:
    """Logits of transformers' model whose quantized layers get rows of bytes."""

    def rounded(_: Any, given: Any) -> tuple[torch.Tensor]:
        return (round_rows(given[0], row_group(scheme, given[0].shape[-1])),)

    model: Any = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("proj"):
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        logits: NDArray[Any] = model(torch.from_numpy(TOKENS)[None].long()).logits[0].numpy()
    return logits


@pytest.mark.parametrize("case", SCHEMES)
def test_numbers_are_computed_as_they_are_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    scheme, storage = SCHEMES[case]
    directory, dense = saved(tmp_path, scheme)
    with caplog.at_level(logging.INFO):
        loaded = load(directory, scheme.method)
    assert "dequantised" not in caplog.text
    assert "converted" not in caplog.text
    check(logits_of(loaded, TOKENS), exact_logits(dense, scheme))
    assert loaded.model.weight_bytes == weight_bytes(scheme, storage)


@pytest.mark.parametrize(
    "groups",
    [
        None,
        [1],
        {"group_0": 1},
        {"group_0": {"input_activations": {"type": "int", "num_bits": 4}}},
        {"group_0": {"input_activations": {"type": "float", "num_bits": 8}}},
        {"group_0": {"input_activations": {**ACTIVATIONS, "strategy": "group"}}},
        {"group_0": {"input_activations": ACTIVATIONS}, "group_1": {"input_activations": None}},
    ],
)
def test_a_row_has_one_scale_only_if_the_config_plans_it(tmp_path: Path, groups: Any) -> None:
    directory, dense = saved(tmp_path, BYTES)
    change_config(directory, {"config_groups": groups})
    loaded = load(directory, BYTES.method)
    check(logits_of(loaded, TOKENS), exact_logits(dense, WEIGHT_ONLY))
    assert loaded.model.weight_bytes == weight_bytes(WEIGHT_ONLY, "Q8_0")


def test_rows_that_are_no_whole_blocks_are_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_decoder(tmp_path / "quantized", "llama", hidden_size=80)
    write_quantized(directory, BYTES, tmp_path / "dense")
    with caplog.at_level(logging.INFO):
        found = logits_of(load(directory, BYTES.method), TOKENS)
    assert "18 of 21 quantized matrices are dequantised" in caplog.text
    expected = load_native(EngineArgs(str(tmp_path / "dense"), backend="native"))
    assert np.abs(found - logits_of(expected, TOKENS)).max() < 0.1 * np.abs(found).max()


def test_one_scale_may_be_that_of_all_features(tmp_path: Path) -> None:
    directory, dense = saved(tmp_path, BYTES)
    tensors, exact = load_file(directory / WEIGHTS), load_file(dense / WEIGHTS)
    scale = torch.tensor([2.0**-7])
    tensors[f"{QUERY}weight_scale"] = scale
    tensors[f"{QUERY}weight_zero_point"] = torch.zeros(64, 1).char()
    exact[f"{QUERY}weight"] = tensors[f"{QUERY}weight"] * scale
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    save_file(exact, dense / WEIGHTS, metadata={"format": "pt"})
    loaded = load(directory, BYTES.method)
    check(logits_of(loaded, TOKENS), exact_logits(dense, BYTES))
    assert loaded.model.weight_bytes == weight_bytes(BYTES, "I8_ROWS")


@pytest.mark.parametrize("group_size", [64, 128, None])
@pytest.mark.parametrize("scheme", [GPTQ, AWQ, PACKED], ids=lambda scheme: scheme.method)
def test_groups_may_have_any_size(tmp_path: Path, scheme: Scheme, group_size: int | None) -> None:
    directory = save_decoder(
        tmp_path / "quantized", "llama", hidden_size=128, intermediate_size=256
    )
    dense, scheme = tmp_path / "dense", replace(scheme, group_size=group_size)
    write_quantized(directory, scheme, dense)
    found = logits_of(load(directory, scheme.method), TOKENS)
    expected = exact_logits(dense, scheme)
    check(found, expected)
    first, second = np.sort(expected, axis=1)[:, :-3:-1].T
    is_clear = first - second > 0.1 * np.abs(expected).max()
    assert np.array_equal(found.argmax(1)[is_clear], expected.argmax(1)[is_clear])
    assert is_clear.sum() > 20


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "llama, tied, biases"])
def test_other_families_are_read_alike(tmp_path: Path, name: str) -> None:
    directory, dense = saved(tmp_path, GPTQ, name)
    check(logits_of(load(directory, "gptq"), TOKENS), exact_logits(dense, GPTQ))


@pytest.mark.parametrize("case", DEQUANTISED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_has_no_blocks_is_dequantised_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, dtype: Any
) -> None:
    scheme, reason = DEQUANTISED[case]
    directory, dense = saved(tmp_path, scheme, has_blocks=False)
    with caplog.at_level(logging.INFO):
        found = logits_of(load(directory, scheme.method, dtype=dtype), TOKENS)
    assert "21 of 21 quantized matrices are dequantised" in caplog.text
    assert "'model.layers.0.self_attn.q_proj.weight'" in caplog.text
    assert reason in caplog.text
    whole = load_native(EngineArgs(str(dense), backend="native", dtype=dtype))
    assert np.array_equal(found, logits_of(whole, TOKENS))


@pytest.mark.parametrize("scheme", [AWQ, BYTES], ids=lambda scheme: scheme.method)
def test_matrices_may_be_left_dense(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scheme: Scheme
) -> None:
    def is_quantized(name: str) -> bool:
        return name.endswith("proj.weight") and "k_proj" not in name and "layers.1" not in name

    directory, dense = saved(tmp_path, scheme, is_quantized=is_quantized)
    with caplog.at_level(logging.INFO):
        found = logits_of(load(directory, scheme.method), TOKENS)
    # Queries and values are multiplied with keys.
    assert "4 of 23 matrices are converted to float32" in caplog.text
    assert "dequantised" not in caplog.text
    expected = logits_of(load_native(EngineArgs(str(dense), backend="native")), TOKENS)
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("scheme", [PACKED, BYTES], ids=lambda scheme: scheme.layout[1])
def test_a_quantized_head_is_read(tmp_path: Path, scheme: Scheme) -> None:
    directory, dense = saved(
        tmp_path, scheme, is_quantized=lambda name: name.endswith(("proj.weight", "head.weight"))
    )
    found = logits_of(load(directory, "compressed-tensors"), TOKENS)
    expected = logits_of(load_native(EngineArgs(str(dense), backend="native")), TOKENS)
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


def change(directory: Path, part: str, tensor: torch.Tensor | None) -> None:
    """Replace or remove a tensor of a matrix."""
    tensors = load_file(directory / WEIGHTS)
    del tensors[QUERY + part]
    if tensor is not None:
        tensors[QUERY + part] = tensor
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


DAMAGES: dict[str, tuple[Scheme, str, torch.Tensor | None, str]] = {
    "no zero points": (GPTQ, "qzeros", None, f"lack '{QUERY}qzeros'"),
    "no scales": (AWQ, "scales", None, f"lack '{QUERY}scales'"),
    "no scale": (BYTES, "weight_scale", None, f"lack '{QUERY}weight_scale'"),
    "no numbers": (GPTQ, "qweight", None, f"lack 1 of the model's weights, .*'{QUERY}weight'"),
    "few words": (GPTQ, "qweight", torch.zeros(4, 64).int(), r"is \(4, 64\) in its files"),
    "3 bits": (PACKED, "weight_packed", torch.zeros(64, 7).int(), r"\(64, 8\) for 4 bits or"),
    "few zeros": (AWQ, "qzeros", torch.zeros(2, 7).int(), r"qzeros' is \(2, 7\) in its files"),
    "floats": (AWQ, "qweight", torch.zeros(64, 8), "as F32; the native backend reads I32"),
    "scale of bytes": (GPTQ, "scales", torch.zeros(2, 64).char(), "as I8; the native backend"),
    "flat scales": (GPTQ, "scales", torch.zeros(128), r"is \(128,\) in its files"),
    "no groups": (GPTQ, "scales", torch.zeros(0, 64), r"is \(0, 64\) in its files"),
    "odd groups": (AWQ, "scales", torch.ones(3, 64), r"qzeros' is \(2, 8\) in its files"),
    "a group too many": (GPTQ, "g_idx", torch.full((64,), 2).int(), "other than its 2 groups"),
    "a group below": (GPTQ, "g_idx", torch.arange(-1, 63).int(), "other than its 2 groups"),
    "few bytes": (BYTES, "weight", torch.zeros(64, 63).char(), r"is \(64, 63\) in its files"),
    "few scales": (BYTES, "weight_scale", torch.ones(63, 1), r"is \(63, 1\) in its files"),
    "no scale of bytes": (BYTES, "weight_scale", torch.full((64, 1), torch.inf), "are infinite"),
    "large scales": (BYTES, "weight_scale", torch.full((64, 1), 3e36), "are infinite"),
    "no number": (GPTQ, "scales", torch.full((2, 64), torch.nan), "are infinite or no numbers"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, case: str) -> None:
    scheme, part, tensor, words = DAMAGES[case]
    directory, _ = saved(tmp_path, scheme)
    change(directory, part, tensor)
    with pytest.raises(ModelLoadError, match=words):
        load(directory, scheme.method)


@pytest.mark.parametrize("scheme", [GPTQ, V2, AWQ], ids=lambda scheme: scheme.layout[1])
def test_zero_points_may_be_0(tmp_path: Path, scheme: Scheme) -> None:
    directory, dense = save_decoder(tmp_path / "quantized", "llama"), tmp_path / "dense"
    tensors = load_file(directory / WEIGHTS)
    for name in tensors:
        if name.endswith("proj.weight"):
            tensors[name][::5].abs_()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_quantized(directory, scheme, dense)
    check(logits_of(load(directory, scheme.method), TOKENS), exact_logits(dense, scheme))


def test_groups_of_minus_one_are_in_order(tmp_path: Path) -> None:
    directory, dense = saved(tmp_path, GPTQ)
    change(directory, "g_idx", torch.full((64,), -1).int())
    check(logits_of(load(directory, "gptq"), TOKENS), exact_logits(dense, GPTQ))


def test_random_damage_is_refused_or_read(tmp_path: Path) -> None:
    directory, _ = saved(tmp_path, GPTQ)
    content, random = (directory / WEIGHTS).read_bytes(), np.random.default_rng(8)
    length, num_refused = int.from_bytes(content[:8], "little"), 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.integers(8, 8 + length, 2):
            damaged[place] = random.integers(0, 256)
        (directory / WEIGHTS).write_bytes(damaged)
        try:
            load(directory, "gptq")
        except ModelLoadError:
            num_refused += 1
    assert 20 < num_refused <= 60


@pytest.mark.parametrize(
    ("scheme", "fields", "words"),
    [
        (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; .* gptq, gptq_v2"),
        (AWQ, {"version": "gemv"}, "version is 'gemv'; the native backend reads gemm"),
        (BYTES, {"format": "float-quantized"}, "format is 'float-quantized'; .* int-quantized"),
        (BYTES, {"format": None}, "format is 'none'"),
        (BYTES, {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is"),
        (BYTES, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
        (BYTES, {"sparsity_config": [1]}, "sparsity_config is"),
    ],
)
def test_layouts_that_are_not_read_are_refused(
    tmp_path: Path, scheme: Scheme, fields: dict[str, Any], words: str
) -> None:
    directory, _ = saved(tmp_path, scheme)
    change_config(directory, fields)
    with pytest.raises(UnsupportedModelError, match=words):
        load(directory, scheme.method)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("awq", "has quant_method 'gptq': give 'gptq', or leave it out"),
        ("gguf", "is no GGUF file: give 'gptq', or leave it out"),
    ],
)
def test_another_format_is_refused(tmp_path: Path, quantization: str, words: str) -> None:
    directory, dense = saved(tmp_path, GPTQ)
    with pytest.raises(ConfigError, match=words):
        load(directory, quantization)
    with pytest.raises(ConfigError, match=r"give 'int8', 'w8a8' or 'int4'"):
        load(dense, quantization)


@pytest.mark.parametrize("scheme", [GPTQ, AWQ, PACKED], ids=lambda scheme: scheme.method)
def test_without_the_option_files_are_refused_as_before(tmp_path: Path, scheme: Scheme) -> None:
    directory, _ = saved(tmp_path, scheme)
    for quantization in (None, "int8", "w8a8", "int4"):
        words = f"quantization_config is .* without quantization='{scheme.method}': give backend"
        with pytest.raises(UnsupportedModelError, match=words):
            load(directory, quantization, backend="native")


@pytest.mark.parametrize("quantization", ["gptq", "awq", "compressed-tensors"])
def test_the_native_backend_is_chosen(quantization: Any) -> None:
    args = EngineArgs("m", quantization=quantization)
    assert choose_backend(args) == ("native", f"for quantization={quantization!r}", False)
    with pytest.raises(ConfigError, match="backend is 'torch'"):
        replace(args, backend="torch")

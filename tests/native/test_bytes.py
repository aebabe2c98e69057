"""Products of bytes on the native backend, against transformers with the same rounded numbers."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import pagedserve.native.load
from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.native.choice import choose_backend
from pagedserve.native.load import LoadedNative, load_native
from pagedserve.native.rounding import rounded_to_blocks
from pagedserve.quantize.likelihood import WINDOW, compare, log_probabilities, windows
from pagedserve.quantize.run import _sample
from tests.support.decoders import VOCAB_SIZE, save_decoder
from tests.support.gguf_models import stored_rows, write_gguf
from tests.support.native import logits_of

TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 80, np.int32)
MIXED = {
    "q_proj": Type.Q4_0,
    "k_proj": Type.Q8_0,
    "v_proj": Type.Q8_0,
    "down": Type.Q5_1,
}

# How much larger than others one number of a row is.
OUTLIER = 20

Round = Callable[[torch.Tensor], torch.Tensor]


def in_blocks(kind: Type) -> Round:
    """Weights as a file of this type has them."""

    def rounded(weights: torch.Tensor) -> torch.Tensor:
        stored = stored_rows(weights.numpy(), kind)
        numbers = torch.from_numpy(gguf.quants.dequantize(stored, kind))
        return numbers.reshape(weights.shape)

    return rounded


def round_rows(rows: torch.Tensor, size: int = 32) -> torch.Tensor:
    """Rows as multiples of a 127th of the largest magnitude of that many numbers."""
    groups = rows.unflatten(-1, (-1, size))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    whole = torch.where(scales > 0, groups / scales, 0).round()
    return torch.flatten(whole * scales, -2)


def turned(numbers: torch.Tensor) -> torch.Tensor:
    """Each 64 numbers of a row times the Hadamard matrix, whose square is 64 times the identity.

    Sums are added in the order of the product's, so that they round alike.
    """
    for distance in (1, 2, 4, 8, 16, 32):
        first, second = numbers.unflatten(-1, (-1, 2, distance)).unbind(-2)
        numbers = torch.stack([first + second, first - second], -2).flatten(-3)
    return numbers


def round_turned(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers that are turned to become multiples of a scale for each row, and turned back."""
    return turned(round_rows(turned(numbers), numbers.shape[-1])) / 64


def w8a8_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows as "w8a8" rounds them: turned, or in blocks where they are no whole groups of 64."""
    return round_rows(rows) if rows.shape[-1] % 64 else round_turned(rows)


def w8a8_weights(weights: torch.Tensor) -> torch.Tensor:
    """The same of weights."""
    return in_blocks(Type.Q8_0)(weights) if weights.shape[-1] % 64 else round_turned(weights)


def oracle(
    directory: Path,
    weights: Callable[[str], Round],
    rows: Callable[[str], Round] = lambda _: round_rows,
    *,
    keeps_embedding: bool = False,
) -> NDArray[Any]:
    """Logits of transformers' model whose linear layers have rounded weights and rows.

    An embedding of its own is rounded too, unless it is kept.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    with torch.inference_mode():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                if not (tied and name == "lm_head"):
                    module.weight.copy_(weights(name)(module.weight))
                module.register_forward_pre_hook(
                    lambda _, given, name=name: (rows(name)(given[0]),)
                )
        if tied or not keeps_embedding:
            embedding = model.model.embed_tokens.weight
            embedding.copy_(weights("embed_tokens")(embedding))
        logits: NDArray[Any] = model(torch.from_numpy(TOKENS)[None].long()).logits[0].numpy()
    return logits


def load_bytes(path: Path, quantization: Any = "gguf", **options: Any) -> LoadedNative:
    return load_native(EngineArgs(str(path), quantization=quantization, **options))


def check(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Rows that are rounded to another byte by a float's last bit are few."""
    errors = np.abs(found - expected) / np.abs(expected).max()
    assert np.median(errors) < 2e-3
    assert errors.max() < 0.05


@pytest.mark.parametrize("storage", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"])
def test_files_are_computed_as_they_are_stored(tmp_path: Path, storage: str) -> None:
    kind = Type[storage]
    directory = save_decoder(tmp_path, "llama, tied, biases")
    path = write_gguf(directory, tmp_path / "model.gguf", kind)
    expected = oracle(directory, lambda _: in_blocks(kind))
    check(logits_of(load_bytes(path), TOKENS), expected)


def test_types_may_be_mixed(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "qwen3")
    path = write_gguf(directory, tmp_path / "model.gguf", Type.Q4_1, storages=MIXED)

    def weights(name: str) -> Round:
        return in_blocks(next((MIXED[word] for word in MIXED if word in name), Type.Q4_1))

    check(logits_of(load_bytes(path), TOKENS), oracle(directory, weights))


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama, tied, biases"])
def test_plain_weights_may_become_bytes(tmp_path: Path, name: str) -> None:
    # Smaller weights, as another byte counts for more where a whole row shares its scale.
    directory = save_decoder(tmp_path, name, initializer_range=0.1)
    expected = oracle(directory, lambda _: w8a8_weights, lambda _: w8a8_rows, keeps_embedding=True)
    check(logits_of(load_bytes(directory, "w8a8"), TOKENS), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama, tied, biases"])
def test_plain_weights_may_become_four_bits(tmp_path: Path, name: str) -> None:
    """All but embedding and head, which are those of "w8a8"."""
    directory = save_decoder(tmp_path, name, initializer_range=0.1)

    def four_bits(weights: torch.Tensor) -> torch.Tensor:
        stored = rounded_to_blocks(weights.numpy(), "Q4_1")
        return torch.from_numpy(gguf.quants.dequantize(stored, Type.Q4_1))

    ends = ("lm_head", "embed_tokens")
    expected = oracle(
        directory,
        lambda name: w8a8_weights if name in ends else four_bits,
        lambda name: w8a8_rows if name in ends else round_rows,
        keeps_embedding=True,
    )
    check(logits_of(load_bytes(directory, "int4"), TOKENS), expected)


def test_int4_keeps_blocks_that_are_no_larger(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama")
    path = write_gguf(directory, tmp_path / "model.gguf", Type.Q4_0, storages={"down": Type.Q8_0})
    num_weights = 3 * 64 * (64 + 32 + 32 + 64 + 2 * 96)  # of Q4_0
    made, kept = (load_bytes(source, "int4").model.weight_bytes for source in (directory, path))
    assert made - kept == num_weights // 32 * (20 - 18)


def test_weights_beyond_float16_are_refused_as_four_bits(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 3] = 1e6
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"32 of the 6144 numbers of 'model.layers.1.mlp.down"):
        load_bytes(directory, "int4")


def test_weights_that_cannot_be_turned_become_those_of_a_q8_0_file(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama, tied, biases", hidden_size=96)
    path = write_gguf(directory, tmp_path / "model.gguf", Type.Q8_0)
    expected = logits_of(load_bytes(path), TOKENS)
    for source in (path, directory):
        assert np.array_equal(logits_of(load_bytes(source, "w8a8"), TOKENS), expected)


def test_an_outlier_of_a_row_leaves_room_for_the_others(tmp_path: Path) -> None:
    """With a scale for a whole row and nothing turned the error is twice as large."""
    directory = save_decoder(tmp_path, "llama")
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if "layernorm" in name:
            tensor[3] *= OUTLIER
        elif any(word in name for word in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            tensor[:, 3] /= OUTLIER
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    plain = load_native(EngineArgs(str(directory), backend="native"))
    expected = logits_of(plain, TOKENS)
    found = logits_of(load_bytes(directory, "w8a8"), TOKENS)
    whole = oracle(
        directory,
        lambda _: in_blocks(Type.Q8_0),
        lambda _: lambda rows: round_rows(rows, rows.shape[-1]),
        keeps_embedding=True,
    )
    error, error_of_whole = (np.square(each - expected).mean() ** 0.5 for each in (found, whole))
    assert error < 0.6 * error_of_whole


def test_real_weights_keep_their_likelihood(model_package: None) -> None:
    """With a scale for a whole row and nothing turned the divergence is ten times as large."""
    tokenizer = load_tokenizer(EngineArgs("smollm2"), uses_transformers=False)
    texts = windows(tokenizer, _sample(), 2 * WINDOW)
    plain = load_native(EngineArgs("smollm2", backend="native"))
    expected = list(log_probabilities(plain, texts))
    loaded = load_native(EngineArgs("smollm2", backend="native", quantization="w8a8"))
    found = compare(log_probabilities(loaded, texts), expected, texts)
    assert 0 < found.mean_kl < 0.012
    assert 0.98 < found.perplexity_ratio < 1.02


def test_rows_of_no_whole_blocks_stay_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_decoder(tmp_path, "llama", hidden_size=80)
    with caplog.at_level(logging.INFO):
        found = logits_of(load_bytes(directory, "w8a8"), TOKENS)
    assert "19 of 23 matrices are converted to float32" in caplog.text
    assert "'lm_head.weight' of type F32 is the first" in caplog.text
    expected = logits_of(load_native(EngineArgs(str(directory), backend="native")), TOKENS)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("quantization", ["gguf", "w8a8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_the_same_in_any_chunks_and_on_any_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, dtype: str
) -> None:
    directory = save_decoder(tmp_path, "qwen3")
    path = write_gguf(directory, tmp_path / "model.gguf", Type.Q4_1, storages=MIXED)
    found = []
    for num_threads in (1, 2):
        monkeypatch.setattr(pagedserve.native.load, "num_compute_threads", lambda n=num_threads: n)
        loaded = load_bytes(path, quantization, dtype=dtype)
        found += [logits_of(loaded, TOKENS), logits_of(loaded, TOKENS, 1, 2, 40, 77, 79)]
    for other in found[1:]:
        assert np.array_equal(found[0], other)


def test_blocks_that_could_be_computed_as_stored_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_decoder(tmp_path, "llama")
    path = write_gguf(directory, tmp_path / "model.gguf", Type.Q4_1, storages={"down": Type.F16})
    with caplog.at_level(logging.INFO):
        load_native(EngineArgs(str(path), backend="native"))
    assert "converted to float32 from blocks of Q4_1; with quantization 'gguf'" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load_native(EngineArgs(str(directory), backend="native"))
    assert "blocks" not in caplog.text


def test_what_is_not_computed_as_stored_is_converted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_decoder(tmp_path, "llama")
    storages = {
        "up_proj": Type.Q5_0,
        "down": Type.F16,
    }  # a gate shares panels with what it gates
    path = write_gguf(directory, tmp_path / "model.gguf", Type.Q8_0, storages=storages)
    with caplog.at_level(logging.INFO):
        loaded = load_bytes(path)
    assert "6 of 23 matrices are converted to float32" in caplog.text
    assert "'blk.0.ffn_gate.weight' of type Q8_0 is the first" in caplog.text
    whole = load_native(EngineArgs(str(path), backend="native"))
    found, expected = (logits_of(each, TOKENS) for each in (loaded, whole))
    assert np.abs(found - expected).max() < 0.2 * np.abs(expected).max()
    assert not np.array_equal(found, expected)


def test_held_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama")
    path = write_gguf(directory, tmp_path / "model.gguf", Type.Q4_0)
    weights, blocks = 64 * (97 + 3 * (64 + 32 + 32 + 64 + 3 * 96)), 18 / 32
    padding = 64 * (2 * 31)  # of both vocabularies
    assert load_bytes(path).model.weight_bytes == (weights + 64 * 97 + padding) * blocks


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama")
    path = write_gguf(directory, tmp_path / "model.gguf", Type.Q4_0)
    reader = gguf.GGUFReader(path)
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
    content = bytearray(path.read_bytes())
    content[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"32 of the 6144 numbers of 'blk.1.ffn_down.weight'"):
        load_bytes(path)


def test_the_native_backend_is_chosen() -> None:
    for quantization in ("gguf", "w8a8", "int4"):
        args = EngineArgs("m", quantization=quantization)
        assert choose_backend(args) == ("native", f"for quantization={quantization!r}", False)
        with pytest.raises(ConfigError, match="backend is 'torch': give quantization='int8'"):
            replace(args, backend="torch")


def test_a_directory_has_no_blocks(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama")
    with pytest.raises(ConfigError, match="is no GGUF file: give 'int8', 'w8a8' or 'int4'"):
        load_bytes(directory)

"""Quantized copies of tiny GGUF files, beside files that the gguf package writes."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.models.load.progress import progress_shown
from pagedserve.native.load import load_native, open_native
from pagedserve.quantize import TargetName, gguf_copy
from pagedserve.quantize.gguf_copy import GgufCopy, check_output
from pagedserve.quantize.targets import TARGETS
from tests.support.decoders import VOCAB_SIZE, save_decoder
from tests.support.gguf_models import write_gguf
from tests.support.native import logits_of
from tests.support.terminal import stderr_terminal

TOKENS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 40, np.int32)


def copied(path: Path, target: TargetName) -> Path:
    opened = open_native(EngineArgs(str(path), backend="native"))
    assert opened.header is not None
    output = path.with_name("copy.gguf")
    GgufCopy.of(opened.checkpoint, opened.header, TARGETS[target]).write(output)
    return output


def logits(path: Path) -> NDArray[np.float32]:
    return logits_of(load_native(EngineArgs(str(path), quantization="gguf")), TOKENS)


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", ["llama", "llama, tied, biases", "gemma"])
@pytest.mark.parametrize("storage", [Type.F32, Type.F16, Type.BF16])
def test_w8a8_is_the_q8_0_file_of_the_gguf_package(
    tmp_path: Path, name: str, storage: Type
) -> None:
    directory = save_decoder(tmp_path, name, torch.float16)
    output = copied(write_gguf(directory, tmp_path / "plain.gguf", storage), "w8a8")
    expected = write_gguf(directory, tmp_path / "q8_0.gguf", Type.Q8_0)
    assert types(output) == types(expected)
    if storage != Type.BF16:  # which rounds the weights first
        assert np.array_equal(logits(output), logits(expected))


def test_int4_has_q8_0_at_both_ends(tmp_path: Path) -> None:
    path = write_gguf(save_decoder(tmp_path, "qwen3"), tmp_path / "plain.gguf")
    found = types(copied(path, "int4"))
    ends = {"token_embd.weight", "output.weight"}
    for name, kind in types(path).items():
        is_vector = "norm" in name or name.endswith(".bias")
        expected = "F32" if is_vector else "Q8_0" if name in ends else "Q4_1"
        assert (kind, found[name]) == ("F32", expected)


def test_int4_keeps_smaller_blocks_and_w8a8_does_not(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama", hidden_size=256, intermediate_size=256)
    storages = {"q_proj": Type.Q4_0, "embed": Type.Q5_1, "up_proj": Type.F16}
    path = write_gguf(directory, tmp_path / "mixed.gguf", Type.Q8_0, storages=storages)
    mixed, reader = types(copied(path, "int4")), gguf.GGUFReader(path)
    assert mixed["token_embd.weight"] == "Q5_1"
    assert (mixed["blk.0.attn_q.weight"], mixed["blk.0.ffn_up.weight"]) == ("Q4_0", "Q4_1")
    stored = {
        tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "copy.gguf").tensors
    }
    for tensor in reader.tensors:
        if tensor.tensor_type.name == mixed[tensor.name]:
            assert np.array_equal(stored[tensor.name], tensor.data)
    (tmp_path / "copy.gguf").unlink()
    assert set(types(copied(path, "w8a8")).values()) == {"F32", "Q8_0"}


def test_rows_of_no_whole_blocks_are_copied(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama", hidden_size=80)
    path = write_gguf(directory, tmp_path / "plain.gguf")
    found = types(copied(path, "w8a8"))
    assert {name for name, kind in found.items() if kind == "Q8_0"} == {
        f"blk.{layer}.ffn_down.weight" for layer in range(3)
    }
    assert found["token_embd.weight"] == "F32"


def test_other_tensors_and_fields_are_kept(tmp_path: Path) -> None:
    directory = save_decoder(tmp_path, "llama, scaled rope")
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    path = write_gguf(directory, tmp_path / "plain.gguf", divisors=divisors)
    reader = gguf.GGUFReader(copied(path, "w8a8"))
    (found,) = [tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    assert np.array_equal(found.data, divisors)
    assert all(tensor.data_offset % 32 == 0 for tensor in reader.tensors)
    assert reader.fields["general.file_type"].contents() == 7
    assert reader.fields["general.quantization_version"].contents() == 2
    before = gguf.GGUFReader(path).fields
    assert reader.fields["llama.rope.freq_base"].contents() == (
        before["llama.rope.freq_base"].contents()
    )


def test_a_file_that_would_not_change_is_refused(tmp_path: Path) -> None:
    path = write_gguf(save_decoder(tmp_path, "llama"), tmp_path / "q8_0.gguf", Type.Q8_0)
    with pytest.raises(ConfigError, match="none of its matrices, which are Q8_0, would change"):
        copied(path, "w8a8")


@pytest.mark.parametrize(
    ("weight", "said"), [(np.inf, "are infinite or no numbers"), (1e6, "of Q4_1 are at most 65504")]
)
def test_weights_that_no_block_has_leave_no_file(tmp_path: Path, weight: float, said: str) -> None:
    from safetensors.numpy import load_file, save_file

    directory = save_decoder(tmp_path, "llama")
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = weight
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    path = write_gguf(directory, tmp_path / "plain.gguf")
    before = set(tmp_path.iterdir())
    with pytest.raises(ModelLoadError, match=f"'blk.1.ffn_down.weight'.*{said}"):
        copied(path, "int4")
    assert set(tmp_path.iterdir()) == before


def test_an_interrupted_copy_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(save_decoder(tmp_path, "llama"), tmp_path / "plain.gguf")
    before = set(tmp_path.iterdir())
    rows = gguf_copy._rows
    seen: list[set[Path]] = []

    def interrupted(*args: object) -> Iterator[NDArray[np.float32]]:
        seen.append(set(tmp_path.iterdir()) - before)
        if len(seen) > 3:
            raise KeyboardInterrupt
        yield from rows(*args)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(gguf_copy, "_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copied(path, "w8a8")
    assert [len(files) for files in seen] == [1] * 4
    assert set(tmp_path.iterdir()) == before


def test_a_terminal_shows_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(save_decoder(tmp_path, "llama"), tmp_path / "plain.gguf")
    with stderr_terminal(monkeypatch) as terminal, progress_shown(is_shown=True):
        copied(path, "w8a8")
    assert "quantizing: 100%" in terminal.shown()


def test_outputs_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"a\.gguf' exists; give another name, or delete it"):
        check_output(tmp_path / "a.gguf")
    path = write_gguf(save_decoder(tmp_path, "llama"), tmp_path / "plain.gguf")
    opened = open_native(EngineArgs(str(path), backend="native"))
    assert opened.header is not None
    copy = GgufCopy.of(opened.checkpoint, opened.header, TARGETS["w8a8"])
    with pytest.raises(ConfigError, match=r"output: cannot write .*: No such file or directory"):
        copy.write(tmp_path / "none" / "b.gguf")

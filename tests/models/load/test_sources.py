"""From names to files."""

import json
from pathlib import Path

import pytest

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.models.load.sources import num_file_bytes, resolve_model


def test_smollm2_is_the_file_of_the_installed_package(model_package: None) -> None:
    source = resolve_model("smollm2")
    assert source.is_gguf
    assert source.path.is_file()


def test_the_size_of_a_model_is_that_of_the_files_with_its_weights(
    model_package: None, tmp_path: Path
) -> None:
    assert num_file_bytes(EngineArgs("smollm2")) == resolve_model("smollm2").path.stat().st_size
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    for number in range(2):
        (tmp_path / f"part{number}.safetensors").write_bytes(b"x" * (3 + number))
    (tmp_path / "consolidated.safetensors").write_bytes(b"x" * 100)
    index = {"weight_map": {"a": "part0.safetensors", "b": "part1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert num_file_bytes(EngineArgs(str(tmp_path))) == 7
    assert num_file_bytes(EngineArgs(str(tmp_path), load_format="dummy")) == 0
    (tmp_path / "model.safetensors").write_bytes(b"x" * 5)
    assert num_file_bytes(EngineArgs(str(tmp_path))) == 5


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nothing"), "nothing.gguf"):
        with pytest.raises(ModelLoadError, match="no such file or directory"):
            resolve_model(name)


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match=r"no such file .*/file: Not a directory"):
        resolve_model(str(tmp_path / "file" / "model"))


def test_neither_path_nor_hub_id() -> None:
    with pytest.raises(ModelLoadError, match=r"'a b\?': neither a path nor a hub id"):
        resolve_model("a b?")


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("config", [None, '{"model_type": "llama"}'])
def test_an_adapter_is_told_by_name(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json.*lora_request"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_config_that_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        resolve_model(str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model is ''; it must be smollm2"),
        ({"model": "x", "dtype": "int8"}, "int8.*must be one of auto, float32"),
        ({"model": "x", "max_model_len": 0}, "at least 2"),
    ],
)
def test_arguments_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**options)  # type: ignore[arg-type] # that is the test

"""The tokenizer, loaded without the model: from a directory, a GGUF file, a config alone."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LongT5Config

from pagedserve.config import EngineArgs
from pagedserve.errors import ModelLoadError, UnsupportedModelError
from pagedserve.models.tokenizer.loader import load_tokenizer


@pytest.fixture
def directory(
    tmp_path: Path, tiny_config: dict[str, Any], save_tokenizer: Callable[[Path], None]
) -> Path:
    """A model's directory with weights that nobody could read."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    save_tokenizer(tmp_path)
    return tmp_path


def test_no_weights_are_read(directory: Path) -> None:
    assert load_tokenizer(EngineArgs(str(directory)))("w5").input_ids == [5]


@pytest.mark.usefixtures("model_package")
def test_a_gguf_file_has_its_tokenizer_in_it() -> None:
    tokenizer = load_tokenizer(EngineArgs("smollm2"))
    assert tokenizer.decode(tokenizer("the cat").input_ids) == "the cat"
    assert tokenizer.chat_template


def test_a_dummy_directory_without_a_tokenizer_counts(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()
    assert load_tokenizer(EngineArgs(str(directory), load_format="dummy"))("5 17").input_ids == [
        5,
        17,
    ]
    with pytest.raises(ModelLoadError, match="has no tokenizer that transformers can load"):
        load_tokenizer(EngineArgs(str(directory)))


def test_an_unknown_architecture_is_named_before_the_tokenizer(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "no_such_thing"}))
    with pytest.raises(UnsupportedModelError, match="no_such_thing"):
        load_tokenizer(EngineArgs(str(directory)))
    LongT5Config().save_pretrained(directory)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load_tokenizer(EngineArgs(str(directory)))


def test_weights_are_asked_for_as_when_the_model_is_loaded(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        load_tokenizer(EngineArgs(str(directory)))


def test_code_of_a_repository_is_never_run(directory: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "configuration_own.py").write_text("raise SystemExit")
    with pytest.raises(UnsupportedModelError, match="code of the model's repository, which is nev"):
        load_tokenizer(EngineArgs(str(directory)))


def change_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_token_that_no_table_has_room_for_is_refused(directory: Path) -> None:
    vocabulary = {"w1": 1, "<unk>": 0, "far": 4_000_000_000}
    change_json(directory / "tokenizer.json", lambda file: file["model"].update(vocab=vocabulary))
    with pytest.raises(
        ModelLoadError, match="has the token 4000000000; accepted are up to 16777216"
    ):
        load_tokenizer(EngineArgs(str(directory)))


def test_a_chat_template_that_is_no_text_is_refused(directory: Path) -> None:
    change_json(directory / "tokenizer_config.json", lambda file: file.update(chat_template=5))
    with pytest.raises(ModelLoadError, match="chat_template is '5'; it must be a text"):
        load_tokenizer(EngineArgs(str(directory)))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("content", ["", "[" * 10**5, "[1]", '{"a": '])
def test_a_damaged_file_is_refused(directory: Path, file: str, content: str) -> None:
    (directory / file).write_text(content)
    with pytest.raises(ModelLoadError, match="has no tokenizer that transformers can load"):
        load_tokenizer(EngineArgs(str(directory)))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja", "modules.json"])
def test_a_pipe_is_not_waited_for(directory: Path, file: str) -> None:
    (directory / file).unlink(missing_ok=True)
    os.mkfifo(directory / file)
    assert load_tokenizer(EngineArgs(str(directory)))("w5").input_ids == [5]

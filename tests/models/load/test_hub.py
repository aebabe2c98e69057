"""Models from hubs: a real server on this machine, asked by the hubs' own libraries."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.models.load.hub import USE_MODELSCOPE, needed_files
from pagedserve.models.loader import load_model
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.sampling_params import SamplingParams
from tests.support.hubs import Repository, hub_of, use_hugging_face
from tests.support.terminal import WIDTH, stderr_terminal

NAME = "someone/tiny"
# What lies beside the files that are needed.
OTHERS = [
    "README.md",
    "consolidated.safetensors",
    "consolidated.00.pth",
    "original/params.json",
    "onnx/model.onnx",
    "onnx/config.json",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "model.gguf",
]


@pytest.fixture
def directory(save_tiny: Callable[..., Path]) -> Path:
    return save_tiny("llama")


@pytest.fixture
def repository(directory: Path) -> Repository:
    """A model on branch main, with another vocabulary's tokenizer on branch old."""
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    main = files | dict.fromkeys(OTHERS, b"x")
    old = files | {"tokenizer.json": files["tokenizer.json"].replace(b'"w5"', b'"five"')}
    return Repository({"main": main, "old": old})


@pytest.fixture
def hub(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Repository]:
    """What the Hugging Face Hub is to this process; its cache is empty."""
    with hub_of({NAME: repository}) as url:
        use_hugging_face(url, tmp_path / "hub", monkeypatch)
        yield repository


def args(**options: Any) -> EngineArgs:
    return EngineArgs(NAME, **options)


def test_only_what_is_needed_is_fetched_once(hub: Repository, directory: Path) -> None:
    load_model(args(device="cpu"))
    mine = {path.name for path in directory.iterdir() if path.is_file()}
    assert set(hub.fetched) == mine
    hub.fetched.clear()
    hub.revisions.clear()  # what is here is used without asking
    load_model(args(device="cpu"))
    assert not hub.fetched


def test_a_tokenizer_alone_is_fetched_without_weights(hub: Repository, directory: Path) -> None:
    tokenizer = load_tokenizer(EngineArgs(str(directory), tokenizer=NAME))
    assert tokenizer("w5").input_ids == [5]
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    load_model(args(device="cpu"))  # finds the rest
    assert "model.safetensors" in hub.fetched


def test_a_revision_is_what_is_loaded(hub: Repository) -> None:
    assert load_tokenizer(args())("w5").input_ids == [5]
    assert load_tokenizer(args(revision="old"))("five").input_ids == [5]
    assert load_tokenizer(args(tokenizer_revision="old"))("five").input_ids == [5]
    assert load_tokenizer(args(revision="old", tokenizer_revision="main"))("w5").input_ids == [5]
    commit = hub.commit("old")
    assert load_tokenizer(args(revision=commit))("five").input_ids == [5]
    with pytest.raises(ModelLoadError, match=r"someone/tiny.*Hugging Face Hub failed.*nothing"):
        load_tokenizer(args(revision="nothing"))


def test_a_revision_of_a_local_model_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"revision is 'old'.*only one"):
        load_tokenizer(EngineArgs(str(directory), revision="old"))
    assert load_tokenizer(EngineArgs(str(directory), revision="main"))("w5").input_ids == [5]


def test_a_token_is_shown_and_not_told(hub: Repository) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelLoadError, match="401"):
        load_tokenizer(args())
    with pytest.raises(ModelLoadError, match="401") as refused:
        load_tokenizer(args(hf_token="hf_other"))
    assert "hf_other" not in str(refused.value)
    given = args(hf_token="hf_secret")
    assert load_tokenizer(given)("w5").input_ids == [5]
    assert "hf_secret" not in repr(given)


def test_files_are_kept_where_an_option_says(hub: Repository, tmp_path: Path) -> None:
    load_tokenizer(args(download_dir=str(tmp_path / "mine")))
    assert list((tmp_path / "mine").rglob("tokenizer.json"))
    assert not (tmp_path / "hub").exists()


def test_a_model_that_was_fetched_in_part_is_completed(hub: Repository, tmp_path: Path) -> None:
    load_model(args(device="cpu"))
    (weights,) = (tmp_path / "hub").rglob("model.safetensors")
    weights.resolve().unlink()
    weights.unlink()
    hub.fetched.clear()
    load_model(args(device="cpu"))
    assert hub.fetched == ["model.safetensors"]


def test_quiet_or_not(hub: Repository, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from pagedserve import LLM

    LLM(NAME, device="cpu", kv_cache_memory=1 << 20, use_tqdm_on_load=False)
    assert not capfd.readouterr().err
    LLM(NAME, device="cpu", kv_cache_memory=1 << 20, download_dir=str(tmp_path / "again"))
    said = capfd.readouterr().err
    assert "%|" not in said  # bars are for terminals
    loading, fetching, *_ = said.splitlines()
    assert loading == f"loading {NAME}"
    assert fetching.startswith("fetching ")
    assert f"files of {NAME} (the main branch) from the Hugging Face Hub" in fetching


def test_a_terminal_shows_one_bar_at_a_time_within_its_width(
    hub: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedserve import LLM

    with stderr_terminal(monkeypatch) as terminal:
        llm = LLM(NAME, backend="torch", device="cpu", kv_cache_memory=1 << 20)
        llm.generate("w5", SamplingParams(max_tokens=2))
        llm.generate("w5", SamplingParams(max_tokens=2), use_tqdm=False)
        shown = terminal.shown()
    bars = ["downloading", "Loading weights", "replacing modules", "prompts"]
    places = [shown.index(bar) for bar in bars]
    assert places == sorted(places)
    for bar, end in zip(bars, [*places[1:], len(shown)], strict=True):
        assert shown.rindex(bar) < end  # it is over before the next begins
    assert "\x1b[A" not in shown  # the cursor stays on one line
    lines = re.split(r"[\r\n]+", shown)
    assert all(len(line) <= WIDTH for line in lines if "%" in line)
    assert "Fetching" not in shown  # the library's own bars


def test_needed_files_of_shards_and_old_formats() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = "model.safetensors.index.json"
    texts = ["config.json", "tokenizer.model", "additional_chat_templates/tool.jinja"]
    names = [*texts, *shards, index, *OTHERS, "tf_model.h5", "pytorch_model.bin.index.json"]
    assert set(needed_files(names, "model")) == {*texts, *shards, index}
    assert set(needed_files(names, "config")) == set(texts)
    old = [*texts, "pytorch_model.bin", "training_args.bin"]
    assert set(needed_files(old, "model")) == {*texts, "pytorch_model.bin"}


def test_a_shard_that_is_not_there_is_named(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-1-of-2.safetensors")
    weights = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ModelLoadError, match=r"1 of the 2 files.*model-2-of-2\.safetensors"):
        load_model(EngineArgs(str(directory)))


@pytest.fixture
def modelscope(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Repository]:
    """What ModelScope is to this process; its cache is empty."""
    config = pytest.importorskip("modelscope_hub").HubConfig
    modelscope_hub = pytest.importorskip("modelscope_hub")
    repository.revisions["master"] = repository.revisions.pop("main")
    with hub_of({NAME: repository}) as url:
        monkeypatch.setenv(USE_MODELSCOPE, "1")
        before = modelscope_hub.get_default_config()
        mine = config(endpoint=url, cache_dir=tmp_path / "modelscope")
        modelscope_hub.set_default_config(mine)
        yield repository
        modelscope_hub.set_default_config(before)


def test_modelscope_in_the_place_of_the_hub(modelscope: Repository, directory: Path) -> None:
    assert load_tokenizer(args(revision="old"))("five").input_ids == [5]
    modelscope.fetched.clear()
    load_model(args(device="cpu"))
    mine = {path.name for path in directory.iterdir() if path.is_file()}
    assert set(modelscope.fetched) == mine
    modelscope.fetched.clear()
    load_model(args(device="cpu"))
    assert not modelscope.fetched


def test_modelscope_wants_its_switch_to_be_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USE_MODELSCOPE, "perhaps")
    with pytest.raises(ModelLoadError, match="'perhaps'; it must be 1, 0, true or false"):
        load_tokenizer(args())

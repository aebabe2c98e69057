"""Results of probes that are kept: used at the next load, and only for what they are of."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve.cache.layers import LayerShape
from pagedserve.config import EngineArgs
from pagedserve.errors import UnsupportedModelError
from pagedserve.models.check import probe_cache
from pagedserve.models.check.probe import ProbeResult
from pagedserve.models.check.probe_cache import ProbeCacheEntry
from pagedserve.models.loader import load_model

SaveTiny = Callable[..., Path]
RESULT = ProbeResult(
    (LayerShape(num_kv_heads=2, key_size=8, value_size=4, window=16),),
    ("model.layers.0.self_attn",),
    max_exact_len=64,
    selects_logits=True,
    vocab_size=97,
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that looks like a model's, and a cache that is empty."""
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_a_result_is_recalled(model: Path) -> None:
    ProbeCacheEntry.of(model, torch.float32, "rust").save(RESULT)
    assert ProbeCacheEntry.of(model, torch.float32, "rust").load() == RESULT


def test_a_result_is_of_one_way_to_run_and_of_files_as_they_are(model: Path) -> None:
    ProbeCacheEntry.of(model, torch.float32).save(RESULT)
    assert ProbeCacheEntry.of(model, torch.bfloat16).load() is None
    os.utime(model / "config.json", ns=(1, 1))
    assert ProbeCacheEntry.of(model, torch.float32).load() is None


@pytest.mark.parametrize("own", ["kernels/decode.py", "models/check/probe.py", "_core"])
def test_a_result_depends_on_the_code_that_made_it(model: Path, own: str) -> None:
    assert any(f"/{own}" in line for line in ProbeCacheEntry.of(model).depends_on)


def test_a_file_that_is_gone_once_it_is_found_is_no_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "here.py").touch()
    (package / "gone.py").symlink_to(package / "nothing")  # a name with no file behind it
    monkeypatch.setattr(probe_cache, "_PACKAGE", package)
    lines = ProbeCacheEntry.of(model).depends_on
    assert [line.split()[0] for line in lines if str(package) in line] == [f"{package}/here.py"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"depends_on": 3}'])
def test_a_damaged_file_is_as_good_as_none(model: Path, content: str) -> None:
    entry = ProbeCacheEntry.of(model)
    entry.save(RESULT)
    entry.file.write_text(content)
    assert entry.load() is None


def test_a_cache_that_cannot_be_written_is_no_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(model / "config.json" / "below-a-file"))
    entry = ProbeCacheEntry.of(model)
    entry.save(RESULT)
    assert entry.load() is None


def test_the_second_load_knows_what_the_first_found(
    save_tiny: SaveTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path / "cache"))
    config = EngineArgs(model=str(save_tiny("mistral", sliding_window=8)))
    layers = load_model(config, torch.device("cpu")).layers
    (file,) = (tmp_path / "cache" / "probed").iterdir()
    content = json.loads(file.read_text())
    content["layers"][0]["window"] = 5  # what only the file says
    file.write_text(json.dumps(content))
    again = load_model(config, torch.device("cpu")).layers
    assert [layer.window for layer in layers] == [8, 8]
    assert [layer.window for layer in again] == [5, 8]


def test_other_weights_are_probed_again(save_tiny: SaveTiny) -> None:
    directory = save_tiny("llama")
    load_model(EngineArgs(model=str(directory)), torch.device("cpu"))
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(directory)
    entry = ProbeCacheEntry.of(directory)
    load_model(EngineArgs(model=str(directory)), torch.device("cpu"))
    stamps = [line for line in entry.depends_on if "model.safetensors" in line]
    assert json.loads(entry.file.read_text())["depends_on"].count(stamps[0]) == 1


def test_a_refused_model_stays_refused(save_tiny: SaveTiny) -> None:
    config = EngineArgs(model=str(save_tiny("recurrent_gemma", head_dim=8)))
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="RecurrentGemmaForCausalLM"):
            load_model(config, torch.device("cpu"))

"""Default sampling parameters of a GGUF file."""

from pathlib import Path

import pytest

from pagedserve import SamplingParams
from pagedserve.config import EngineArgs
from pagedserve.engine.defaults import default_sampling_params, public_name
from pagedserve.errors import ConfigError
from tests.support.tokenizer_kinds import write_gguf

FIELDS = {
    "sampling_temp": 0.25,
    "sampling_top_k": 20,
    "sampling_top_p": 0.75,
    "sampling_min_p": 0.125,
    "sampling_penalty_repeat": 1.5,
}


def test_a_gguf_file_recommends_sampling_parameters(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", "gpt2", **FIELDS)
    recommended = SamplingParams(
        temperature=0.25, top_k=20, top_p=0.75, min_p=0.125, repetition_penalty=1.5
    )
    assert default_sampling_params(EngineArgs(str(path))) == recommended
    plain = EngineArgs(str(path), generation_config="vllm")
    assert default_sampling_params(plain) == SamplingParams()


def test_a_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"generation_config: cannot read .* cut short"):
        default_sampling_params(EngineArgs(str(path)))


def test_a_path_is_no_public_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "local").mkdir(parents=True)
    for name in ("owner/model", "smollm2"):
        assert public_name(EngineArgs(name)) == name
    for name in ("owner/local", str(tmp_path), "./model", "~/model", "a/b/c"):
        assert public_name(EngineArgs(name)) is None

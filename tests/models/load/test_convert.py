"""GGUF files: broken ones, and the converted copy."""

from pathlib import Path

import pytest

from pagedserve.errors import ModelLoadError
from pagedserve.models.load.convert import cache_directory, check_gguf, converted_directory
from pagedserve.models.load.sources import resolve_model


@pytest.fixture
def gguf(model_package: None) -> Path:
    return resolve_model("smollm2").path


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.001, 0.5, 0.999])
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
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path / "cache"))

    def fail(*_: object) -> None:
        raise ModelLoadError("no")

    monkeypatch.setattr("pagedserve.models.load.convert._convert", fail)
    with pytest.raises(ModelLoadError):
        converted_directory(gguf)
    assert not list((tmp_path / "cache" / "converted").iterdir())


def test_a_conversion_is_made_once_and_known_by_its_file(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path / "cache"))
    calls: list[Path] = []

    def convert(_: Path, directory: Path) -> None:
        calls.append(directory)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr("pagedserve.models.load.convert._convert", convert)
    link = tmp_path / "model.gguf"
    link.symlink_to(gguf)
    first = converted_directory(link)
    assert converted_directory(link) == first
    assert len(calls) == 1
    assert (first / "config.json").is_file()

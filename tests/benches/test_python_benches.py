"""The bench scripts run and say what they promise; their figures are not judged here."""

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHES = Path(__file__).resolve().parents[2] / "benches" / "python"


def script(name: str) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCHES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def border() -> Iterator[ModuleType]:
    yield from script("border")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHES))  # it imports its neighbours
    before = torch.get_num_threads()
    yield from script("products")
    torch.set_num_threads(before)  # of the whole process


def test_products_of_each_kind_of_weights(
    products: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    products.main(["--json", "--rows", "1,5", "--layers", "1", "--rounds", "1", "--threads", "1"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["num_rows"] for line in lines] == [1] * 4 + [5] * 4
    for float32, bfloat16, *int8 in (lines[:4], lines[4:]):
        assert float32["times_float32"] == 1
        num_bytes = [line["gb_per_s"] * line["ms"] for line in (float32, bfloat16, *int8)]
        shares = [num_bytes[0] / size for size in num_bytes[1:]]
        assert shares == pytest.approx([2, 4, 4], rel=0.02)


def test_border_prints_one_object_a_line(
    border: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json", "--ns", "1,20", "--context", "64", "--steps", "10", "--window", "32"]
    border.main(options)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    settings = [(line["n"], line["window"]) for line in lines]
    assert settings == [(1, None), (1, 32), (20, None), (20, 32)]
    for line in lines:
        assert line.keys() == {"n", "prefix_caching", "window", "us"}
        assert 0 < line["us"] < math.inf


def test_border_splits_a_step(border: ModuleType) -> None:
    split = border.measure(40, context=100, num_steps=20)
    parts = split.schedule + split.prepare_inputs + split.update
    assert parts == pytest.approx(split.total, rel=0.5)


@pytest.fixture
def startup() -> Iterator[ModuleType]:
    yield from script("startup")


def test_startup_measures_the_import_and_the_help(
    startup: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    startup.main(["--json", "--rounds", "1"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == list(startup.COMMANDS)
    assert all(line["ms"] > 0 for line in lines)


@pytest.fixture
def structured(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHES))
    yield from script("structured")


@pytest.mark.slow
def test_steps_that_keep_to_a_schema_are_compared(
    structured: ModuleType, model_package: None, capsys: pytest.CaptureFixture[str]
) -> None:
    structured.main(["--json", "--rows", "2", "--rounds", "1"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert [line["sampling"] for line in lines] == ["greedy", "drawn"]
    for line in lines:
        least, _, most = line["spread"].partition(" to ")
        assert 0 < float(least) <= line["schema/free"] + 0.001
        assert line["schema/free"] <= float(most) + 0.001

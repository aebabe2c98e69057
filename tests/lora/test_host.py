"""Which adapters are in host memory, and what their ordinals stand for."""

import os
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from pagedserve.errors import RequestError, StepError
from pagedserve.lora.adapter import CONFIG, WEIGHTS
from pagedserve.lora.host import HostAdapter, HostAdapters
from pagedserve.regular_files import read_bytes
from tests.support.lora import save_random_adapter

KIND = "query and value"


@pytest.fixture
def host(base: PreTrainedModel) -> HostAdapters:
    """Room for two."""
    names = [name for name, _ in base.named_modules()]
    shapes = {name: (64, 64) for name in names if name.endswith("q_proj")}
    shapes |= {name: (64, 32) for name in names if name.endswith("v_proj")}
    return HostAdapters(shapes, max_rank=4, max_cpu_loras=2)


@pytest.fixture
def paths(base: PreTrainedModel, tmp_path: Path) -> list[str]:
    """Three adapters, written long ago."""
    paths = [save_random_adapter(base, KIND, tmp_path / str(seed), seed=seed) for seed in range(3)]
    for path in paths:
        make_older(path)
    return [str(path) for path in paths]


def make_older(path: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        os.utime(path / name, (1e9, 1e9))


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read from now on."""
    found: list[Path] = []

    def noting(path: Path, max_bytes: int) -> bytes:
        found.append(path)
        return read_bytes(path, max_bytes)

    monkeypatch.setattr("pagedserve.lora.adapter.read_bytes", noting)
    return found


def test_an_adapter_is_read_once(
    host: HostAdapters, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reads(monkeypatch)
    first = host.load("a", paths[0])
    assert len(found) == 2
    assert host.load("another name", paths[0]) is first
    assert len(found) == 2
    assert host.weights(first.ordinal) is first.weights


def test_of_those_that_nobody_holds_the_last_asked_for_stay(
    host: HostAdapters, paths: list[str]
) -> None:
    alive = [weakref.ref(host.load("a", paths[n])) for n in (0, 1)]
    assert host.load("a", paths[0]) is alive[0]()
    alive.append(weakref.ref(host.load("a", paths[2])))
    assert [adapter() is not None for adapter in alive] == [True, False, True]


def test_one_that_somebody_holds_stays_and_is_not_read_again(
    host: HostAdapters, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = host.load("a", paths[0])
    for path in paths[1:]:
        host.load("a", path)
    found = reads(monkeypatch)
    assert host.load("a", paths[0]) is held
    assert host.weights(held.ordinal) is held.weights
    assert not found


def test_one_that_was_dropped_goes_with_the_last_who_holds_it(
    host: HostAdapters, paths: list[str]
) -> None:
    held = host.load("a", paths[0])
    ordinal = held.ordinal
    host.drop(ordinal)
    host.drop(ordinal)
    assert host.weights(ordinal) is held.weights
    del held
    with pytest.raises(StepError, match=f"adapter {ordinal} is not in host memory"):
        host.weights(ordinal)


def test_an_ordinal_is_of_contents(host: HostAdapters, paths: list[str], tmp_path: Path) -> None:
    ordinals = [host.load("a", path).ordinal for path in paths]
    assert len(set(ordinals)) == 3
    assert min(ordinals) > 0, "0 is the model alone"
    copied = shutil.copytree(paths[0], tmp_path / "copy")
    assert host.load("b", str(copied)).ordinal == ordinals[0]
    assert host.load("a", paths[1]).ordinal == ordinals[1], "evicted and read again"


@pytest.mark.parametrize("is_old", [True, False])
def test_changed_files_are_another_adapter(
    host: HostAdapters, paths: list[str], *, is_old: bool
) -> None:
    """Also where size and time are what they were, if the time is of this moment."""
    path = Path(paths[0])
    if not is_old:
        shutil.copy(path / WEIGHTS, path / "weights")
        (path / "weights").replace(path / WEIGHTS)
    before = host.load("a", str(path))
    times = (path / WEIGHTS).stat()
    changed = bytearray((path / WEIGHTS).read_bytes())
    changed[-2] ^= 1
    (path / WEIGHTS).write_bytes(changed)
    if not is_old:
        os.utime(path / WEIGHTS, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = host.load("a", str(path))
    assert after.ordinal != before.ordinal
    assert differ(before, after)
    changed[-2] ^= 1
    (path / WEIGHTS).write_bytes(changed)
    assert host.load("a", str(path)).ordinal == before.ordinal


def differ(one: HostAdapter, other: HostAdapter) -> bool:
    return any(
        not (np.array_equal(one.weights[name].a, a) and np.array_equal(one.weights[name].b, b))
        for name, (a, b) in other.weights.items()
    )


def test_a_refusal_leaves_nothing_behind(host: HostAdapters, paths: list[str]) -> None:
    path = Path(paths[0])
    whole = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(whole[:100])
    for _ in range(2):
        with pytest.raises(RequestError, match="adapter 'a': adapter_model"):
            host.load("a", paths[0])
    (path / WEIGHTS).write_bytes(whole)
    assert host.load("a", paths[0]).ordinal == 1

"""The check of a GPU, as far as it goes without one."""

import importlib
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benches" / "python")
    return importlib.import_module("gpu_check")


def test_a_part_that_hangs_is_given_up_with_all_that_it_started(
    check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper = "import time; time.sleep(60)"
    program = f"""import subprocess, sys
print("begun", flush=True)
subprocess.run([sys.executable, "-c", {sleeper!r}])"""
    started = time.perf_counter()
    [end] = check.Part("sleeps", ("-c", program), 2).run()
    assert time.perf_counter() - started < 30
    assert not end["holds"]
    assert end["measured"].startswith("given up after 2 s")
    assert "begun" in capsys.readouterr().out


def test_the_parts_fit_into_eight_minutes(check: ModuleType) -> None:
    assert sum(part.seconds for part in check.parts()) < 8 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    script = ROOT / "benches" / "python" / "gpu_check.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "sees no CUDA device" in done.stderr

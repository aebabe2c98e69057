"""The check of a GPU, as far as it goes without one."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended: init may not have reaped it yet."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benches" / "python")
    return importlib.import_module("gpu_check")


def test_a_part_that_hangs_is_given_up_with_all_that_it_started(
    check: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper = "import time; time.sleep(3600)"  # who waits for it never ends
    program = f"""import os, subprocess, sys
started = subprocess.Popen([sys.executable, "-c", {sleeper!r}])
print("begun", os.getpid(), started.pid, flush=True)
started.wait()"""
    [end] = check.Part("sleeps", ("-c", program), 4).run()
    assert not end["holds"]
    assert end["measured"].startswith("given up after 4 s")
    printed = capsys.readouterr().out
    (begun,) = [line for line in printed.splitlines() if "begun" in line]
    for pid in map(int, begun.split()[-2:]):
        assert not is_running(pid)


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

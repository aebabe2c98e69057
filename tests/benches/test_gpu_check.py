"""The check of a GPU, as far as it goes without one."""

import contextlib
import importlib
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def wait_until_ended(pid: int) -> None:
    """Wait for a process that was killed; init may not have reaped it then."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.01)


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
    for seconds in (1, 8, 64):  # as long as both take to begin
        [end] = check.Part("sleeps", ("-c", program), seconds).run()
        assert not end["holds"]
        assert end["measured"].startswith(f"given up after {seconds} s")
        printed = capsys.readouterr().out
        if begun := [line for line in printed.splitlines() if "begun" in line]:
            break
    for pid in map(int, begun[0].split()[-2:]):
        wait_until_ended(pid)  # for ever, if it was not killed


def test_the_parts_fit_into_eight_minutes(check: ModuleType) -> None:
    assert sum(part.seconds for part in check.parts() if part.num_gpus == 1) < 8 * 60


def test_without_a_gpu_it_says_so_in_one_line(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert "sees no CUDA device" in printed.err

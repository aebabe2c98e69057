"""`.ci/run` passes when each of its steps passes, and fails when any fails."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
STEPS = " ".join(re.findall(r"^(?:make|beside) ([a-z -]+)", SCRIPT, re.MULTILINE)).split()


@pytest.mark.parametrize("failing", [None, *STEPS])
def test_it_fails_if_and_only_if_a_step_fails(tmp_path: Path, failing: str | None) -> None:
    """`make` is a program that fails for one target: the checks themselves run elsewhere."""
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\nfor target; do [ "$target" != "$FAILING" ] || exit 2; done\n')
    make.chmod(0o755)
    environment = os.environ | {
        "FAILING": failing or "",
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
    }
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (failing is None), done.stderr

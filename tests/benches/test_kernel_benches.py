"""The benches of the GPU kernels say in one line that they need a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

BENCHES = Path(__file__).resolve().parents[2] / "benches" / "python"


@pytest.mark.parametrize(
    "script", ["kernels", pytest.param("tune_kernels", marks=pytest.mark.slow)]
)
def test_without_a_gpu(script: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCHES / f"{script}.py"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"{script}.py needs a CUDA device" in line

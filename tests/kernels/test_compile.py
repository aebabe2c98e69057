"""The kernels compile for GPUs that are not here, with the table's configurations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("head_sizes", "capabilities"), [("128", "80,90"), ("256", "90")])
def test_nothing_spills(head_sizes: str, capabilities: str) -> None:
    # A process of its own: here the kernels may be the interpreter's.
    command = [
        *(sys.executable, str(ROOT / "benches" / "python" / "compile_kernels.py"), "--json"),
        *("--dtypes", "bfloat16", "--head-sizes", head_sizes, "--capabilities", capabilities),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["kernel"] for row in rows} == {
        *("decode", "decode_wide", "prefill", "prefill_plain", "write", "copy", "stage"),
        *("add_norm", "rotate_and_write", "swiglu"),
    }
    assert not [row for row in rows if row["local bytes"]]
    assert all(row["16-byte loads"] == "yes" for row in rows)
    # On Hopper a tile of queries is multiplied by its own matrix instructions.
    assert all(
        row["wgmma"] == "yes"
        for row in rows
        if row["sm"] == 90 and row["kernel"].startswith("prefill")
    )

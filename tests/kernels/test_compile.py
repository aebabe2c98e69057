"""The kernels compile for GPUs that are not here as the table cuts them, and fit there."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from pagedserve.kernels.tuning import TABLE, config_for

ROOT = Path(__file__).parents[2]
HEAD_SIZES, CAPABILITIES = (64, 128, 256), (80, 90, 100)
WIDTHS = {"bfloat16": 2, "float32": 4}
# What multiplies tiles of 16-bit queries, of 64 rows and more, on each device.
PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def compiled(*options: str) -> list[dict[str, Any]]:
    # A process of its own: here the kernels may be the interpreter's.
    script = ROOT / "benches" / "python" / "compile_kernels.py"
    command = [sys.executable, str(script), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert not [row for row in rows if row["faults"] or row["local bytes"]]
    for row in rows:
        # Half a head of 64 in 16 bits is 64 bytes: 2 for each thread of the warp that turns it.
        is_small = row["kernel"] == "rotate_and_write" and row["head"] == 64
        assert row["16-byte loads"] == "yes" or (is_small and row["dtype"] != "float32")
        if row["kernel"].startswith("prefill") and row["dtype"] != "float32":
            assert row["product"] == PRODUCTS[row["sm"]]
    return rows


def test_the_kernels_of_a_layer_fit() -> None:
    kernels = "decode,prefill_plain,rotate_and_write,shrink,expand,stage,masked_argmax"
    rows = compiled(
        *("--dtypes", "bfloat16", "--head-sizes", "128", "--kernels", kernels),
        *("--options", "plain,int8"),
        *("--capabilities", ",".join(map(str, CAPABILITIES))),
    )
    compiled_for = {(row["kernel"], row["sm"]) for row in rows}
    assert compiled_for == set(product(kernels.split(","), CAPABILITIES))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_row_of_the_table_fits() -> None:
    rows = compiled(
        *("--dtypes", ",".join(WIDTHS)),
        *("--head-sizes", ",".join(map(str, HEAD_SIZES))),
        *("--capabilities", ",".join(map(str, CAPABILITIES))),
    )
    assert {row["kernel"] for row in rows} == {
        *("decode", "decode_wide", "prefill", "prefill_plain", "write", "copy", "stage"),
        *("add_norm", "rotate_and_write", "swiglu", "shrink", "look_up", "expand", "masked_argmax"),
    }
    # Attention and the write are compiled for three types of bytes, two of them on the oldest.
    num_bytes = 5 * (3 * len(CAPABILITIES) - 1)
    num_floats = 21 * len(CAPABILITIES) * len(WIDTHS)
    assert len(rows) == (num_floats + num_bytes) * len(HEAD_SIZES)


def test_what_is_compiled_reaches_every_row_of_the_table() -> None:
    unreached = set(TABLE)
    for kernel, since, width, size in TABLE:
        assert (size in HEAD_SIZES, width in WIDTHS.values()) == (True, True)
        assert 10 * since in CAPABILITIES
        config = config_for(kernel, head_size=size, itemsize=width, capability=since)
        if config is TABLE[kernel, since, width, size]:
            unreached.remove((kernel, since, width, size))
    assert not unreached

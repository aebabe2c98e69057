"""What the benchmarks of an engine say of a bad command line, and what it loads."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagedserve.cli import main

NONE = "no-model-is-needed-to-refuse"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("latency",), "no model: give --model"),
        (("latency", "--input-len", "0"), "--input-len is 0; it must be an integer, 1 or more"),
        (("latency", "--batch-size", "-1"), "--batch-size is -1"),
        (("latency", "--num-iters", "0"), "--num-iters is 0"),
        (("latency", "--num-iters-warmup", "-1"), "an integer, 0 or more"),
        (("latency", "--warmup", "1"), "unrecognized arguments: --warmup"),
        (("throughput", "--dataset-name", "sonnet"), "it must be one of random, sharegpt"),
        (("throughput", "--dataset-name", "sharegpt"), "sharegpt needs --dataset-path"),
        (("throughput", "--dataset-name", "random", "--dataset-path", "x"), "random takes no"),
        (("throughput", "--dataset-path", "x", "--input-len", "5"), "--input-len is for"),
        (("throughput", "--dataset-path", "x", "--random-prefix-len", "5"), "--prefix-len is for"),
        (("throughput", "--input-len", "5", "--random-input-len", "5"), "are both given"),
        (("throughput", "--random-range-ratio", "2"), "it must be from 0 to 1"),
        (("throughput", "--num-prompts", "0"), "--num-prompts is 0"),
        (("startup", "--num-iters-cold", "0"), "--num-iters-cold is 0"),
        (("startup", "--max-num-seqs", "0"), "max_num_seqs is 0"),
    ],
)
def test_refusals_name_the_option(
    capsys: pytest.CaptureFixture[str], argv: Sequence[str], words: str
) -> None:
    model = () if argv == ("latency",) else ("--model", NONE)
    assert main(["bench", *argv, *model]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pagedserve: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_a_model_that_does_not_exist_is_refused_early(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "startup", "--model", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_help_loads_no_extra_and_no_numpy() -> None:
    code = (
        "import contextlib, sys; from pagedserve.cli import main\n"
        "for kind in ('latency', 'throughput', 'startup'):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(['bench', kind, '--help'])\n"
        "print([name for name in ('torch', 'aiohttp', 'tqdm', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.endswith("\n[]\n")
    assert "usage: pagedserve bench startup --model MODEL" in run.stdout

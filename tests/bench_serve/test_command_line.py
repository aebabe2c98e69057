"""What ``pagedserve bench serve`` says of a bad command line, and what it loads."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from pagedserve.cli import main
from tests.support.openai_server import Reply, serving


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a bad command line says: one line on stderr."""
    assert main(["bench", "serve", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pagedserve: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--num-prompts", "0"), "--num-prompts is 0; it must be an integer, 1 or more"),
        (("--request-rate", "0"), "--request-rate is 0.0; it must be above 0, or inf"),
        (("--request-rate", "nan"), "--request-rate is nan"),
        (("--burstiness", "-1"), "--burstiness is -1.0"),
        (("--max-concurrency", "0"), "--max-concurrency is 0"),
        (("--backend", "tgi"), "--backend is 'tgi'; it must be one of openai, openai-chat, vllm"),
        (("--dataset-name", "sonnet"), "it must be one of random, custom, sharegpt, trace"),
        (("--dataset-name", "trace"), "--dataset-name trace needs --dataset-path"),
        (("--dataset-name", "sharegpt"), "--dataset-name sharegpt needs --dataset-path"),
        (("--metadata", "nothing"), "'nothing' is not KEY=VALUE"),
        (("--output-len", "0"), "--output-len is 0; it must be an integer, 1 or more"),
        (("--dataset-path", "x"), "--dataset-name random takes no --dataset-path"),
        (("--goodput", "itl:5"), "'itl:5' is no limit on one of ttft, tpot, e2el"),
        (("--goodput", "ttft:soon"), "'ttft:soon' is not KEY:MS"),
        (("--goodput", "ttft:-1"), "has a limit below 0"),
        (("--percentile-metrics", "ttft,speed"), "'speed' is not one of ttft, tpot"),
        (("--metric-percentiles", "50,101"), "--metric-percentiles[1] is 101.0"),
        (("--metric-percentiles", "p50"), "are no numbers with commas"),
        (("--header", "nothing"), "'nothing' is not KEY=VALUE"),
        (("--extra-body", "{"), "is no JSON"),
        (("--extra-body", "[]"), "is no JSON object"),
        (("--random-range-ratio", "1.5"), "--random-range-ratio is 1.5; it must be from 0 to 1"),
    ],
)
def test_refusals_name_the_option(
    capsys: pytest.CaptureFixture[str], argv: Sequence[str], words: str
) -> None:
    assert words in refusal(capsys, *argv)


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 1 is nobody's: those below 1024 are given to known services alone.
    assert "no server answers at http://127.0.0.1:1" in refusal(capsys, "--port", "1")
    argv = ("--base-url", "nonsense", "--ready-check-timeout-sec", "600")
    assert "is no address of a server" in refusal(capsys, *argv)


def test_a_server_without_models_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda _number, _request: Reply([], 404)) as server:
        assert "names no model: give --model" in refusal(capsys, "--base-url", server.url + "/x")


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_the_options_load_no_extra_and_no_numpy() -> None:
    out = run(
        "import sys; from pagedserve.cli.main import make_parser\n"
        "make_parser().parse_args(['bench', 'serve'])\n"
        "print([name for name in ('torch', 'aiohttp', 'tqdm', 'numpy') if name in sys.modules])"
    )
    assert out == "[]\n"


def test_a_run_loads_nothing_of_the_engine() -> None:
    out = run(
        "import sys, pagedserve.bench.serve\n"
        "names = ('torch', 'transformers', 'pagedserve.engine')\n"
        "print([name for name in names if name in sys.modules])"
    )
    assert out == "[]\n"


@pytest.mark.parametrize("missing", ["aiohttp", "tqdm"])
def test_a_missing_extra_names_the_command(missing: str) -> None:
    # None in sys.modules makes an import fail as if the package were not there.
    out = run(
        f"import sys; sys.modules[{missing!r}] = None\n"
        "sys.stderr = sys.stdout\n"
        "from pagedserve.cli import main\n"
        "print(main(['bench', 'serve']))"
    )
    assert f"pagedserve bench needs {missing}" in out
    assert "pip install 'aiohttp>=" in out
    assert out.endswith("1\n")

"""What a command line refuses before torch or transformers is imported."""

import importlib.metadata
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from pagedserve.cli import early, main
from pagedserve.extras import check_installed, install_command, requirements

HEAVY = ("torch", "transformers", "fastapi")
Install: TypeAlias = Callable[..., None]

# Runs command lines; prints the status of each, and the heavy modules that were imported by then.
RUN = """
import contextlib, io, json, sys
from pagedserve.cli import main
for argv in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = main(argv)
    loaded = [name for name in sys.argv[1:] if name in sys.modules]
    print(json.dumps([status, said.getvalue(), loaded]))
"""


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "may_have_gpu", lambda: False)


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield str(taken.getsockname()[1])


def test_refusals_import_no_heavy_module(tmp_path: Path, taken_port: str) -> None:
    (tmp_path / "llama").mkdir()
    ranks = ["--tensor-parallel-size", "2"]
    batch, here, output = ("run-batch", "hub/model"), f"{tmp_path}/in.jsonl", f"{tmp_path}/out"
    Path(here).touch()
    to, gguf = ("--to", "int4", "-o"), f"{tmp_path}/new.gguf"
    smollm2 = ("quantize", "smollm2", *to)
    expected = {
        ("serve", "hub/model", "--port", taken_port): "Address already in use",
        ("serve", "smolm2"): "no such file or directory; did you mean smollm2?",
        ("serve", f"{tmp_path}/lama"): f"; did you mean {tmp_path}/llama?",
        ("serve", f"{tmp_path}/lama/1b"): f"; did you mean {tmp_path}/llama?",
        ("serve", f"{tmp_path}/llama"): "the directory has no config.json",
        ("serve", "hub/model", "--tokenizer", "./none"): "model './none': no such file",
        ("serve", "hub/model", "--chat-template", "./none"): "chat_template: cannot read ./none",
        ("serve", "hub/model", "--generation-config", "./none"): "generation_config: cannot read",
        ("serve", "hub/model", "--max_model_lens", "5"): "; did you mean --max-model-len?",
        ("serve", "hub/model", "--swap_space=-1"): "swap_space is -1.0; it must be",
        ("serve", "hub/model", *ranks, "--load-format", "dummy"): "tensor_parallel_size is 2",
        (
            "generate",
            *("--model", "smollm2", "--prompt", "a", "--device", "cpu"),
            *("--gpu-memory-utilization", "0.5"),
        ): "gpu_memory_utilization is 0.5, and the model is on the CPU",
        ("deploy", "hub/model", "--port", taken_port): "Address already in use",
        (*batch, "-i", "./none", "-o", output): "input_file: cannot read ./none: No such file",
        (*batch, "-i", here, "-o", str(tmp_path)): "output_file: cannot write",
        (*batch, "-i", here, "-o", here): f"output_file: {here} is the input file",
        (*batch, "-i", here): "arguments are required: -o/--output-file",
        ("run-batch", "smolm2", "-i", here, "-o", output): "; did you mean smollm2?",
        ("quantize", "smolm2", *to, gguf): "; did you mean smollm2?",
        ("quantize", "hub/model", *to, gguf): "model 'hub/model' is a hub's repository, and",
        (*smollm2, here): f"output: '{here}' must end in .gguf",
        (*smollm2, f"{tmp_path}/no/a.gguf"): "no' is no directory; create it",
        (*smollm2, f"{tmp_path}/{'a' * 300}/a.gguf"): "aa': File name too long",
        (*smollm2, gguf, "--text", "./none"): "text: none cannot be read: No such",
        (*smollm2, gguf, "--num-tokens", "1"): "num_tokens is 1; it must be",
    }
    ran = subprocess.run(
        [sys.executable, "-c", RUN, *HEAVY],
        input=json.dumps(list(expected)),
        check=True,
        capture_output=True,
        text=True,
    )
    for (argv, said), line in zip(expected.items(), ran.stdout.splitlines(), strict=True):
        status, stderr, loaded = json.loads(line)
        assert (status, loaded) == (2, []), argv
        assert said in stderr, argv
    assert not Path(output).exists()
    assert not Path(gguf).exists()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu-memory-utilization", "0.5"], "give kv_cache_memory instead"),
        (["--device", "cuda:1"], "device is 'cuda:1', and this machine has no GPU driver"),
    ],
)
def test_a_gpus_options_without_a_driver(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "hub/model", "--port", "0", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Installs a package of requirements as this one, before the real one."""

    def installed(*requirements: str, name: str = "pagedserve") -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", *(f"Requires-Dist: {line}" for line in requirements)]
        (folder / "METADATA").write_text("\n".join([*lines, "", "Requires-Dist: prose>=1"]))
        monkeypatch.syspath_prepend(tmp_path)

    return installed


def test_missing_packages_are_named_with_a_command(install: Install) -> None:
    install("numpy>=1.26", "no-such-package>=2; extra == 'engine'", 'torch ; extra == "engine"')
    assert requirements("engine") == ["no-such-package>=2", "torch"]
    with pytest.raises(ImportError, match=r"\(no-such-package\): pip install 'no-such-package>=2'"):
        check_installed("pagedserve serve", "engine")
    check_installed("pagedserve serve", "serve")


def test_a_package_is_known_by_any_spelling_of_its_name(install: Install) -> None:
    install('Some.Package>=1; extra == "engine"')
    with pytest.raises(ImportError, match="Some"):
        check_installed("pagedserve serve", "engine")
    install(name="some_package")
    check_installed("pagedserve serve", "engine")


def test_an_extra_that_includes_another_lists_its_packages(install: Install) -> None:
    install(
        'jinja2>=3; extra == "cpu"',
        'pagedserve[serve]; extra == "cpu"',
        'uvicorn>=1; extra == "serve"',
    )
    assert requirements("cpu") == ["jinja2>=3", "uvicorn>=1"]


@pytest.mark.parametrize("extra", ["engine", "serve", "otel"])
def test_requirements_are_those_that_the_standard_library_reads(extra: str) -> None:
    listed = importlib.metadata.requires("pagedserve") or []
    marked = [line.partition(";")[0].strip() for line in listed if f"'{extra}'" in line]
    assert requirements(extra) == marked


def test_without_metadata_the_missing_module_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_command("engine", "torch") == "pip install torch"

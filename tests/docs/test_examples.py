"""Every example of the README and of docs: Python runs, requests are answered, commands parse.

In the everyday suite a tiny model stands in for the demo model; `make test-all` runs what needs
real weights, and everything else as printed.
"""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from anthropic import Anthropic
from openai import OpenAI

from pagedserve import LLM, AsyncLLMEngine, LLMEngine
from pagedserve.cli.main import make_parser
from pagedserve.server.models.protocol import LoadLoraBody, UnloadLoraBody
from tests.server.conftest import Served
from tests.support.classifiers import save_classifier
from tests.support.doc_blocks import ROOT, Command, Example, commands, python_examples
from tests.support.images import save_image_model

# What a tiny random model cannot do: end a JSON text, take an adapter of the demo model.
NEEDS_WEIGHTS: Final = {"docs/structured-output.md", "docs/lora.md"}
NEEDS_WHISPER: Final = "openai/whisper-base"
SERVER: Final = "http://127.0.0.1:8000"

EXAMPLES: Final = python_examples()
CURLS: Final = [command for command in commands("curl") if SERVER in " ".join(command.arguments)]
PAGEDSERVE: Final = commands("pagedserve")

Run = Callable[[Example, dict[str, str]], None]


def _needs_weights(example: Example) -> bool:
    return example.page in NEEDS_WEIGHTS or NEEDS_WHISPER in example.code


def _named(example: Example) -> str:
    return f"{example.page}:{example.line}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs an example in an empty directory but for ``examples``, with names replaced."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)

    def running(example: Example, names: dict[str, str]) -> None:
        code = example.code
        for name, other in names.items():
            code = code.replace(f'"{name}', f'"{other}')
        module: dict[str, Any] = {"__name__": "__main__"}
        source = compile(code, f"{ROOT / example.page}:{example.line}", "exec")
        try:
            exec(source, module)  # noqa: S102  # it is ours
        finally:
            for value in module.values():
                if isinstance(value, LLM | LLMEngine | AsyncLLMEngine):
                    value.shutdown()
                elif isinstance(value, OpenAI | Anthropic):
                    value.close()

    return running


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> dict[str, str]:
    """Directories of models for the hub ids of the examples."""
    folder = tmp_path_factory.mktemp("models")
    config = {
        "model_type": "bert",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_labels": 1,
    }
    pairs = save_classifier(folder / "pairs", config)
    return {
        "sentence-transformers/all-MiniLM-L6-v2": str(minilm),
        "cross-encoder/ms-marco-MiniLM-L6-v2": str(pairs),
        "llava-hf/llava-1.5-7b-hf": str(save_image_model("llava", folder / "llava")),
    }


EVERYDAY: Final = [example for example in EXAMPLES if not _needs_weights(example)]


@pytest.mark.parametrize("example", EVERYDAY, ids=_named)
def test_python_runs(
    example: Example,
    run: Run,
    small_models: dict[str, str],
    stand_in: Path,
    stand_in_server: Served,
) -> None:
    names = {"smollm2": str(stand_in), SERVER: str(stand_in_server.http.base_url)}
    if any(package in example.code for package in ("OpenAI(", "Anthropic(", "ollama.Client(")):
        del names["smollm2"]  # the name of the served model
    run(example, small_models | names)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=_named)
def test_python_runs_as_printed(
    example: Example,
    run: Run,
    small_models: dict[str, str],
    whisper_base: Path,
    stand_in_server: Served,
) -> None:
    names = {NEEDS_WHISPER: str(whisper_base), SERVER: str(stand_in_server.http.base_url)}
    run(example, small_models | names)


@pytest.mark.parametrize("curl", CURLS, ids=lambda curl: curl.page)
def test_requests_are_answered(
    curl: Command, stand_in_server: Served, embedding_server: Served
) -> None:
    arguments = curl.arguments
    (url,) = [argument for argument in arguments if argument.startswith(SERVER)]
    path = urlsplit(url).path
    if "-F" in arguments:
        assert path in stand_in_server.http.get("/openapi.json").json()["paths"]
        return
    body = json.loads(arguments[arguments.index("-d") + 1])
    bodies = {"/v1/load_lora_adapter": LoadLoraBody, "/v1/unload_lora_adapter": UnloadLoraBody}
    if path in bodies:  # of adapters that are not here
        bodies[path](**body)
        return
    server = embedding_server if path in {"/v1/embeddings", "/rerank"} else stand_in_server
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("command", PAGEDSERVE, ids=lambda command: shlex.join(command.arguments))
def test_commands_parse(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command.arguments[1:]
    if "--help" in arguments:
        with pytest.raises(SystemExit, match="0"):
            make_parser().parse_args(arguments)
        return
    make_parser().parse_args(arguments)


def test_replay_commands_parse(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log that the page of replay writes is the one that its commands read."""
    from pagedserve.replay.__main__ import main

    (example,) = [example for example in EXAMPLES if example.page == "docs/replay.md"]
    run(example, {})
    replayed = [
        command.arguments[3:]
        for command in commands("python")
        if command.arguments[1:3] == ["-m", "pagedserve.replay"]
        and "decisions.jsonl" in command.arguments
    ]
    assert len(replayed) == 2
    for arguments in replayed:
        monkeypatch.setattr(sys, "argv", ["replay", *arguments])
        assert main(arguments) == 0
    assert capsys.readouterr().out

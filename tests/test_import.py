import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pagedserve
import pagedserve.scheduler
from tests.support.exports import HOME, STUB
from tests.support.tiny import save_tiny_llama
from tests.support.tokenizer_kinds import save


def run(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    ).stdout


def test_importing_loads_no_extra_and_prints_nothing() -> None:
    out = run(
        "import sys, pagedserve; pagedserve.SamplingParams(); pagedserve.Scheduler\n"
        "print([name for name in ('torch', 'transformers', 'tqdm') if name in sys.modules])"
    )
    assert out == "[]\n"


def test_every_public_name_is_there() -> None:
    for name in pagedserve.__all__:
        assert getattr(pagedserve, name) is not None


def test_dir_lists_no_name_of_the_scheduler_alone() -> None:
    assert set(pagedserve.__all__) - set(dir(pagedserve)) <= set(pagedserve.scheduler.__all__)
    assert set(dir(pagedserve)) < set(pagedserve.__all__)
    assert {"LLM", "EngineClient", "ExecutorDeadError", "__version__"} <= set(dir(pagedserve))
    assert "Scheduler" not in dir(pagedserve)


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse(STUB.read_text())
    imported = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == HOME, "make stubs"
    (names,) = (node.value for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(ast.literal_eval(names)) == sorted(pagedserve.__all__), "make stubs"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = pagedserve.LMM  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("missing", "used"),
    [
        ("tokenizers", "pagedserve.LLM(sys.argv[1])"),
        ("torch", "pagedserve.LLM(sys.argv[1], backend='torch')"),
        ("transformers", "pagedserve.LLM(sys.argv[1], backend='torch')"),
    ],
)
def test_a_missing_extra_names_the_command(tmp_path: Path, missing: str, used: str) -> None:
    # None in sys.modules makes an import fail as if the package were not there.
    out = run(
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import pagedserve\n"
        f"try: {used}\n"
        "except ImportError as error: print(error)",
        str(save_tiny_llama(tmp_path)),
    )
    assert "pagedserve.LLM" in out
    assert f" needs {missing}, which is not installed" in out
    assert "pip install 'accelerate>=" in out


WITHOUT_TORCH = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import pagedserve, pagedserve.cli, pagedserve.server
for name in ("EngineArgs", "SamplingParams", "LLM", "LLMEngine", "AsyncLLMEngine"):
    getattr(pagedserve, name)
for module in pkgutil.walk_packages(pagedserve.server.__path__, "pagedserve.server."):
    importlib.import_module(module.name)

from pagedserve.inputs.chat import chat_prompt
from pagedserve.engine.defaults import default_sampling_params
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.output.detokenizer import Detokenizer

args = pagedserve.EngineArgs(sys.argv[1])
tokenizer = load_tokenizer(args)
default_sampling_params(args)
prompt = chat_prompt(tokenizer, [{"role": "user", "content": "the License \U0001f642"}])
ids = prompt["prompt_token_ids"]
print(tokenizer.decode(ids) == prompt["prompt"], prompt["prompt"].encode("unicode_escape"))
stream = Detokenizer(tokenizer, skip_special_tokens=False).stream().advanced(ids)
print(stream.text + stream.rest() == prompt["prompt"], [*ids] == tokenizer.encode(
    prompt["prompt"], add_special_tokens=False))
try:
    pagedserve.cli.main(["--help"])
except SystemExit as end:
    print(end.code)
"""


def test_without_torch_and_transformers_texts_are_tokenized(
    tmp_path: Path, tiny_config: dict[str, Any]
) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    out = run(WITHOUT_TORCH, str(tmp_path)).splitlines()
    assert out[0] == r"True b'<s><user>the License \\U0001f642</s><assistant>'"
    assert (out[1], out[-1]) == ("True True", "0")
    assert any("usage: pagedserve" in line for line in out)


@pytest.mark.usefixtures("model_package")
def test_without_torch_and_transformers_a_gguf_file_is_enough() -> None:
    out = run(WITHOUT_TORCH, "smollm2").splitlines()
    assert "<|im_start|>user\\\\nthe License" in out[0]
    assert (out[1], out[-1]) == ("True True", "0")

"""Text from a process in which torch and transformers cannot be imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.decoders import save_decoder

PROGRAM = """
import json, sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
from pagedserve import LLM, SamplingParams

llm = LLM(model=sys.argv[1])
prompts = json.loads(sys.argv[2])
params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
outputs = llm.generate(prompts, params, use_tqdm=False)
assert not {"torch", "transformers"} & sys.modules.keys()
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""

# What a text from a GGUF file needs none of; some are imported by packages that a start leaves out.
UNUSED = {
    *("torch", "transformers", "fastapi", "jinja2", "tqdm", "numpy.ma", "importlib.metadata"),
    *("asyncio", "email", "hashlib", "multiprocessing", "socket", "ssl"),
    *("pagedserve.decisions", "pagedserve.metrics", "pagedserve.models.load.bars"),
    *("pagedserve.vllm_modules", "pagedserve.server", "pagedserve.runner", "pagedserve.parallel"),
}


def tokens_without_torch(model: str, prompts: list[str]) -> list[list[int]]:
    command = [sys.executable, "-c", PROGRAM, model, json.dumps(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def tokens_with_torch(model: str, prompts: list[str]) -> list[list[int]]:
    from pagedserve import LLM, SamplingParams

    llm = LLM(model=model, backend="torch")
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_native_engine_imports_no_torch_that_is_installed(backend: str) -> None:
    program = """
import re, sys
from pagedserve import LLM, SamplingParams

llm = LLM(model="smollm2", backend=sys.argv[1])
params = SamplingParams(temperature=0, structured_outputs={"regex": "[ab]{3}c"})
(output,) = llm.generate(["hi"], params, use_tqdm=False)
assert re.fullmatch("[ab]{3}c", output.outputs[0].text)
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program, backend], check=True, timeout=300)


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_tokens_are_those_with_torch(model: str, tmp_path: Path) -> None:
    prompts = ["The capital of France is", "Once upon a time"]
    if model != "smollm2":
        model, prompts = str(save_decoder(tmp_path, model)), ["w1 w5 w9", "w4 w8"]
    assert tokens_without_torch(model, prompts) == tokens_with_torch(model, prompts)


@pytest.mark.usefixtures("model_package")
def test_a_start_imports_nothing_that_it_does_not_use() -> None:
    program = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from pagedserve.cli import run
run()
"""
    words = ["generate", "--model", "smollm2", "--backend", "native", "--prompt", "hi"]
    command = [sys.executable, "-c", program, *words, "--max-tokens", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "text:" in done.stdout
    loaded = done.stderr.splitlines()[-1].split()
    assert "pagedserve.native.executor" in loaded
    assert not UNUSED & set(loaded)

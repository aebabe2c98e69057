"""The engine with the Triton backend, on the CPU: kernels in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.doc_blocks import ROOT
from tests.support.examples import LOOKS_AT_ALL

# One of two blocks, and one that comes to its second while it decodes.
PROMPTS = [[5, 6, 7], list(range(20, 37)), [11], [40, 3] * 7]
NUM_TOKENS = 4

# Attention, the kernels of the rest, and whether decode steps are padded as a CUDA graph has them.
Way = tuple[str, str | None, bool]
WAYS: list[Way] = [
    ("torch", "generic", False),
    ("triton", None, False),
    ("triton", None, True),
]
if LOOKS_AT_ALL:  # attention and padding are the same whichever kernels the rest has
    WAYS += [("triton", "generic", False), ("triton", "generic", True)]

# The interpreter is chosen when triton is imported, so the engines run in a process of their own.
PROGRAM = """
import json, sys
from tests.support.interpreter import quicken
quicken()
from pagedserve import LLM, SamplingParams
from pagedserve.runner.model_runner import Forward
from pagedserve.runner.padded import PaddedDecode

directory, prompts, num_tokens, ways = json.loads(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
for backend, kernels, is_padded in ways:
    llm = LLM(
        directory, load_format="dummy", device="cpu", cpu_kernels=kernels, dtype="float32",
        attention_backend=backend, num_gpu_blocks=16, max_num_seqs=4, max_model_len=24,
    )
    executor = llm.llm_engine.model_executor
    if is_padded:
        forward = Forward(executor.worker.loaded, executor.worker.cache)
        executor.worker.runner._padded = PaddedDecode(
            forward, executor.buffers, sizes=(4,), block_size=16
        )
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(given, params, use_tqdm=False)
    print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


# The programs of all ways are run before the first test.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: dict[str, Any]
) -> dict[Way, tuple[Any, str]]:
    """Each way's tokens of each prompt, and what it said of itself on stderr."""
    directory = tmp_path_factory.mktemp("tiny")
    wider = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.3}
    (directory / "config.json").write_text(json.dumps(tiny_config | wider))
    given = json.dumps([str(directory), PROMPTS, NUM_TOKENS, WAYS])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokens = [json.loads(line) for line in done.stdout.splitlines()]
    said = [line for line in done.stderr.splitlines() if "attention: " in line]
    return dict(zip(WAYS, zip(tokens, said, strict=True), strict=True))


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)
@pytest.mark.skipif(
    importlib.util.find_spec("pagedserve.kernels.attention") is None,
    reason="pagedserve.kernels has no Triton kernels",
)
@pytest.mark.parametrize("way", WAYS[1:])
def test_triton_generates_the_tokens_of_torch(
    answers: dict[Way, tuple[Any, str]], way: Way
) -> None:
    replaced = "none" if way[1] == "generic" else "decoder layers 2, norms 1"
    tokens, said = answers[way]
    assert [len(token_ids) for token_ids in tokens] == [NUM_TOKENS] * len(PROMPTS)
    assert tokens == answers[WAYS[0]][0]
    assert "attention: triton (interpreted" in said
    assert f"replaced modules: {replaced}" in said

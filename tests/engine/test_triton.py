"""The engine with the Triton backend, on the CPU: kernels in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROMPTS = [[5, 6, 7], list(range(20, 37)), [11], [40, 3, 40, 3, 40]]
NUM_TOKENS = 16

# The interpreter is chosen when triton is imported, so the engine runs in a process of its own.
PROGRAM = """
import json, sys
from pagedserve import LLM, SamplingParams
from pagedserve.runner.model_runner import Forward
from pagedserve.runner.padded import PaddedDecode

directory, prompts, num_tokens, backend, kernels, is_padded = json.loads(sys.argv[1])
llm = LLM(
    directory, load_format="dummy", device="cpu", cpu_kernels=kernels, dtype="float32",
    attention_backend=backend, num_gpu_blocks=16, max_num_seqs=4,
)
executor = llm.llm_engine.model_executor
if is_padded:
    forward = Forward(executor.loaded, executor._cache)
    executor._runner._padded = PaddedDecode(forward, executor.buffers, sizes=(4,), block_size=16)
params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
given = [{"prompt_token_ids": prompt} for prompt in prompts]
outputs = llm.generate(given, params, use_tqdm=False)
print(json.dumps([output.outputs[0].token_ids for output in outputs]))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tiny_config: dict[str, Any]) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    wider = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.3}
    (path / "config.json").write_text(json.dumps(tiny_config | wider))
    return path


def generate(
    directory: Path, backend: str, kernels: str | None = "generic", *, is_padded: bool = False
) -> tuple[Any, str]:
    """The tokens of each prompt, and what was said on stderr."""
    given = json.dumps([str(directory), PROMPTS, NUM_TOKENS, backend, kernels, is_padded])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def expected(directory: Path) -> Any:
    return generate(directory, "torch")[0]


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)
@pytest.mark.skipif(
    importlib.util.find_spec("pagedserve.kernels.attention") is None,
    reason="pagedserve.kernels has no Triton kernels",
)
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    ("kernels", "replaced"), [(None, "decoder layers 2, norms 1"), ("generic", "none")]
)
def test_triton_generates_the_tokens_of_torch(
    directory: Path, expected: Any, *, is_padded: bool, kernels: str | None, replaced: str
) -> None:
    tokens, said = generate(directory, "triton", kernels, is_padded=is_padded)
    assert [len(token_ids) for token_ids in tokens] == [NUM_TOKENS] * len(PROMPTS)
    assert tokens == expected
    assert "attention: triton (interpreted" in said
    assert f"replaced modules: {replaced}" in said

"""The same tokens on machines that are not this one, each played by a process of its own."""

import ctypes.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedserve import _core

SaveTiny = Callable[..., Path]
SCRIPT = """
import json, sys
from pagedserve import LLM, SamplingParams
llm = LLM(model=sys.argv[1], num_gpu_blocks=64, **json.loads(sys.argv[2]))
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
outputs = llm.generate(prompt_token_ids=[[5, 7, 11], list(range(20, 50))], sampling_params=params)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def run(model: Path, options: dict[str, Any], **environment: str) -> tuple[list[list[int]], str]:
    """The tokens, and what was said about the machine."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), json.dumps(options)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("attention:")]
    return json.loads(done.stdout), said[0]


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_machine(save_tiny: SaveTiny) -> None:
    model = save_tiny("llama", intermediate_size=64)
    expected, _ = run(model, {"cpu_kernels": "generic", "attention_backend": "torch"})
    for instructions in _core.cpu_instruction_sets():
        options = {"cpu_instructions": instructions}
        tokens, said = run(model, options)
        assert tokens == expected
        assert f"rust ({instructions}, threads" in said
    tokens, said = run(model, {}, OMP_NUM_THREADS="1")
    assert tokens == expected
    assert "threads: 1)" in said


@pytest.mark.slow
def test_another_openmp_runtime_that_is_loaded_first(save_tiny: SaveTiny) -> None:
    other = ctypes.util.find_library("gomp")
    if other is None:
        pytest.skip("this machine has no OpenMP runtime beside torch's")
    model = save_tiny("llama", intermediate_size=64)
    expected, _ = run(model, {"cpu_kernels": "generic", "attention_backend": "torch"})
    tokens, said = run(model, {}, LD_PRELOAD=other, OMP_NUM_THREADS="2")
    assert tokens == expected
    assert "threads: 2)" in said

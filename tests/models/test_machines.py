"""The same tokens on machines that are not this one, played by processes of their own."""

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
from pagedserve.models.load.convert import converted_directory
from pagedserve.models.load.sources import resolve_model

SaveTiny = Callable[..., Path]
# One engine after another, each with options of its own.
SCRIPT = """
import json, sys
from pagedserve import LLM, SamplingParams
prompts = [[5, 7, 11], list(range(20, 50))]
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
for options in json.loads(sys.argv[2]):
    llm = LLM(model=sys.argv[1], num_gpu_blocks=64, **options)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""
# Which modules a bfloat16 model has replaced.
REPLACED = """
import sys
from pagedserve import LLM
options = {"cpu_instructions": "avx2", "num_gpu_blocks": 64}
llm = LLM(model=sys.argv[1], backend="torch", dtype="bfloat16", **options)
print(llm.llm_engine.model_executor.worker.loaded.replaced_modules)
"""
GENERIC = {"cpu_kernels": "generic", "attention_backend": "torch"}

Ran = tuple[list[list[int]], str]


def run(model: Path, *options: dict[str, Any], **environment: str) -> list[Ran]:
    """For each of the options the tokens, and what was said about the machine."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), json.dumps(options)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith(("attention:", "native"))]
    return list(zip(map(json.loads, done.stdout.splitlines()), said, strict=True))


def test_tokens_do_not_depend_on_the_machine(save_tiny: SaveTiny) -> None:
    model = save_tiny("llama", intermediate_size=64)
    sets = list(_core.cpu.instruction_sets())
    options = ({"cpu_instructions": name} for name in sets)
    (expected, _), *found = run(model, GENERIC, *options, OMP_NUM_THREADS="1")
    for name, (tokens, said) in zip(sets, found, strict=True):
        assert tokens == expected
        assert f"native ({name}, threads: 1)" in said
    other = ctypes.util.find_library("gomp")  # an OpenMP runtime beside torch's, loaded first
    if other is not None:
        torch = {"backend": "torch"}
        [(tokens, said)] = run(model, torch, LD_PRELOAD=other, OMP_NUM_THREADS="2")
        assert tokens == expected
        assert "threads: 2)" in said


def test_the_environment_selects_where_no_option_does(save_tiny: SaveTiny) -> None:
    model = save_tiny("llama", intermediate_size=64)
    environment = {"PAGEDSERVE_CPU_INSTRUCTIONS": "portable", "OMP_NUM_THREADS": "1"}
    best = {"cpu_instructions": _core.cpu.instruction_sets()[-1]}
    (_, of_environment), (_, of_option) = run(model, {}, best, **environment)
    assert "native (portable, threads: 1)" in of_environment
    assert f"native ({best['cpu_instructions']}, threads: 1)" in of_option


def test_an_environment_that_names_no_instructions_is_refused(save_tiny: SaveTiny) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run(save_tiny("llama"), {}, PAGEDSERVE_CPU_INSTRUCTIONS="mmx")
    assert 'PAGEDSERVE_CPU_INSTRUCTIONS, is "mmx"; this CPU has portable' in failed.value.stderr


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in _core.cpu.instruction_sets(), reason="the CPU lacks AVX2")
def test_a_bfloat16_model_keeps_its_kernels_where_torch_rounds_more(tmp_path: Path) -> None:
    """With AVX2 alone torch's own bfloat16 logits are off by 0.065 of the largest."""
    done = subprocess.run(
        [sys.executable, "-c", REPLACED, str(converted_directory(resolve_model("smollm2").path))],
        env={
            **os.environ,
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "PAGEDSERVE_CACHE": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert "decoder layers 30" in done.stdout
    assert "numerics check" not in done.stderr

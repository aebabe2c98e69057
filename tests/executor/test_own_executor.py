"""``examples/own_executor.py``: an engine over a model of numpy, against dense attention."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import pagedserve
from pagedserve import LLMEngine, RequestOutput, SamplingParams
from pagedserve.executor.numpy_buffers import NumpyBuffers
from pagedserve.executor.protocol import CacheShape, StepLimits
from tests.support.doc_blocks import ROOT

EXAMPLE = ROOT / "examples" / "own_executor.py"
PROMPTS = [[5, 17, 3, 5, 17], [40], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=1)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("max_model_len", "width"), [(1 << 30, 4), (24, 2)])
def test_tables_are_no_wider_than_the_pool(max_model_len: int, width: int) -> None:
    limits = StepLimits(max_num_tokens=8, max_num_rows=256, max_model_len=max_model_len)
    shape = CacheShape(num_gpu_blocks=4, num_cpu_blocks=0, block_size=16, limits=limits)
    assert shape.max_blocks_per_row == width
    assert NumpyBuffers(shape)._block_tables.shape == (256 * width,)


def logprobs_of(model: Any, tokens: list[int]) -> NDArray[np.float64]:
    """Of the token after each, float64 [T, V]; all tokens attend at once, without a cache."""
    embedding = model.embedding.astype(np.float64)
    hidden = embedding[tokens] + model.places[: len(tokens)]
    keys, values = np.split(hidden @ model.key_value, 2, axis=1)
    scores = np.where(np.tri(len(tokens)) > 0, hidden @ model.query @ keys.T, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    logits = (hidden + weights / weights.sum(axis=1, keepdims=True) @ values) @ model.head
    found: NDArray[np.float64] = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
    return found


def finish(engine: LLMEngine, params: SamplingParams) -> dict[str, RequestOutput]:
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    return last


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(answer.token_ids) for answer in output.outputs]


@pytest.mark.parametrize("num_gpu_blocks", [64, 16])
def test_greedy_tokens_are_those_of_the_model_without_pages(
    example: ModuleType, num_gpu_blocks: int
) -> None:
    engine = example.make_engine(num_gpu_blocks=num_gpu_blocks)
    found = finish(engine, LONG)
    assert (engine.scheduler.num_preemptions > 0) == (num_gpu_blocks == 16)
    assert sum(engine.stats.num_accepted_by_place) > 0
    for number, prompt in enumerate(PROMPTS):
        (output,) = found[str(number)].outputs
        known = logprobs_of(engine.model_executor.model, prompt + list(output.token_ids))
        of_output = known[len(prompt) - 1 : -1]
        assert list(output.token_ids) == of_output.argmax(axis=1).tolist()
        for expected, entry in zip(of_output, output.logprobs or (), strict=True):
            assert entry is not None
            assert {entry[token].rank for token in entry} == {1, 2}
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(expected[token], abs=1e-4)
        scored = found[str(number)].prompt_logprobs or []
        for place, (token, given) in enumerate(zip(prompt[1:], scored[1:], strict=True)):
            assert given is not None
            assert given[token].logprob == pytest.approx(known[place, token], abs=1e-4)


def test_samples_do_not_depend_on_drafts_or_preemptions(example: ModuleType) -> None:
    params = SamplingParams(n=2, seed=3, top_k=3, top_p=0.9, max_tokens=30, ignore_eos=True)
    roomy, tight = (finish(example.make_engine(num_gpu_blocks=size), params) for size in (96, 24))
    expected = {name: tokens_of(output) for name, output in roomy.items()}
    assert {name: tokens_of(output) for name, output in tight.items()} == expected
    model = example.Model(0)
    for number, prompt in enumerate(PROMPTS):
        for tokens in expected[str(number)]:
            known = logprobs_of(model, prompt + tokens)[len(prompt) - 1 : -1]
            ranks = (known > known[np.arange(len(tokens)), tokens][:, None]).sum(axis=1)
            assert ranks.max() < 3


def test_a_row_that_cannot_be_sampled_ends_its_request_alone(example: ModuleType) -> None:
    engine = example.make_engine()
    engine.add_request("edited", {"prompt_token_ids": [7]}, SamplingParams(logit_bias={5: 1.0}))
    found = finish(engine, LONG)
    assert found.pop("edited").outputs[0].finish_reason == "error"
    assert {output.outputs[0].finish_reason for output in found.values()} == {"length"}


def test_the_example_runs_with_numpy_alone(tmp_path: Path) -> None:
    """Without site-packages (``-S``); the path has the two packages that it needs."""
    for package in (np, pagedserve):
        folder = Path(package.__path__[0])
        for found in (folder, *folder.parent.glob(f"{folder.name}.libs")):
            (tmp_path / found.name).symlink_to(found)
    command = [sys.executable, "-S", "-c", "import tokenizers"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert subprocess.run(command, check=False, capture_output=True, env=environment).returncode
    command[2:] = [str(EXAMPLE)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    names = sorted(line.split(":")[0] for line in out.stdout.splitlines()[:4])
    assert names == ["edited", "greedy", "sampled", "sampled"]

"""Logits and tokens of tiny models of every family, against transformers and the torch backend."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, EngineArgs, SamplingParams, TokensPrompt
from pagedserve.native.load import load_native
from tests.support.decoders import DECODERS, VOCAB_SIZE, save_decoder
from tests.support.native import logits_of

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder"), request.param)


def test_logits_are_those_of_transformers(decoder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(decoder, dtype=torch.float32)
    tokens = np.random.default_rng(2).integers(0, VOCAB_SIZE, 90, np.int32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens)[None].long()).logits[0].numpy()
    loaded = load_native(EngineArgs(str(decoder), backend="native"))
    found = logits_of(loaded, tokens, 50, 51)
    assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_token_has_the_same_logits_whichever_others_have_some(decoder: Path, dtype: Any) -> None:
    """Of few tokens, the last layer computes only these."""
    loaded = load_native(EngineArgs(str(decoder), backend="native", dtype=dtype))
    tokens = np.random.default_rng(3).integers(0, VOCAB_SIZE, 90, np.int32)
    index = np.array([39, 3, 17, 3], np.int32)
    found = logits_of(loaded, tokens, 40, index=index)
    expected = logits_of(loaded, tokens, 40)
    assert np.array_equal(found, expected[np.concatenate((index, 40 + index))])


def answers(decoder: Path, backend: Any, **options: Any) -> list[Any]:
    llm = LLM(model=str(decoder), backend=backend, num_gpu_blocks=64, **options)
    prompts = [
        TokensPrompt(prompt_token_ids=[(7 * place + row) % 96 + 1 for place in range(30)])
        for row in range(3)
    ]
    return [
        (list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob)
        for output in llm.generate(prompts, GREEDY, use_tqdm=False)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_answers_are_those_of_torch(decoder: Path, dtype: str) -> None:
    """To the last bit; but caps of logits are torch's own operation there."""
    found, expected = (
        answers(decoder, backend, dtype=dtype, cpu_kernels=kernels)
        for backend, kernels in (("native", None), ("torch", "fused"))
    )
    has_caps = "final_logit_softcapping" in (decoder / "config.json").read_text()
    for (tokens, logprob), (other_tokens, other_logprob) in zip(found, expected, strict=True):
        assert tokens == other_tokens
        assert logprob == pytest.approx(other_logprob, abs=1e-4 if has_caps else 0)


def test_int8_answers_are_those_of_torch(tmp_path: Path) -> None:
    path = save_decoder(tmp_path, "gemma3")
    found, expected = (
        answers(path, backend, quantization="int8") for backend in ("native", "torch")
    )
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_files_may_be_of_half_precision(tmp_path: Path, stored: torch.dtype) -> None:
    path = save_decoder(tmp_path, "qwen2", stored)
    assert [tokens for tokens, _ in answers(path, "native")] == [
        tokens for tokens, _ in answers(path, "torch")
    ]

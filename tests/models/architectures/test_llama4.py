"""Llama 4 beyond a chunk and beyond where its temperature sets in: equal to transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, SamplingParams
from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.models.loader import load_model

LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "no_rope_layers": [1, 0],
    "head_dim": 8,
    "intermediate_size_mlp": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("backend", ["rust", "torch", "triton"])
def test_logits_beyond_a_chunk(
    save_tiny: Callable[..., Path],
    assert_exact: Callable[..., None],
    device: torch.device,
    backend: Any,
) -> None:
    directory = save_tiny("llama4_text", **LLAMA4)
    args = EngineArgs(model=str(directory), attention_backend=backend, dtype="float32")
    loaded = load_model(args, device if backend == "triton" else torch.device("cpu"))
    assert loaded.max_model_len == 64
    assert_exact(loaded, directory)


def test_the_engine_generates_as_transformers_does(save_tiny: Callable[..., Path]) -> None:
    directory = save_tiny("llama4_text", **LLAMA4)
    prompts = [[(5 * place + length) % 96 + 1 for place in range(length)] for length in (3, 14, 37)]
    llm = LLM(
        model=str(directory),
        dtype="float32",
        num_gpu_blocks=24,
        block_size=8,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=24,
        max_num_seqs=4,
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = torch.tensor([[*prompt, *output.outputs[0].token_ids]])
        logits = model(tokens).logits[0, len(prompt) - 1 : -1]
        assert list(output.outputs[0].token_ids) == logits.argmax(-1).tolist()


def test_blocks_that_lie_across_chunks_are_refused(save_tiny: Callable[..., Path]) -> None:
    directory = save_tiny("llama4_text", **LLAMA4)
    llm = LLM(model=str(directory), num_gpu_blocks=8, block_size=5)
    with pytest.raises(ConfigError, match=r"block_size is 5.*chunks of 16 tokens.*divide"):
        llm.generate(prompt_token_ids=[[3, 4, 5]], use_tqdm=False)

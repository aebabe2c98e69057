"""What tests of single architectures share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, SamplingParams


@pytest.fixture
def assert_generates() -> Callable[..., None]:
    """Compares greedy tokens of an engine short of memory with what transformers says is next."""

    @torch.inference_mode()
    def check(directory: Path, attention: str = "eager") -> None:
        lengths = (3, 17, 37)
        prompts = [[(7 * place + length) % 96 + 1 for place in range(length)] for length in lengths]
        llm = LLM(
            model=str(directory),
            dtype="float32",
            num_gpu_blocks=24,
            block_size=4,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            max_num_batched_tokens=16,
            max_num_seqs=4,
        )
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate(prompt_token_ids=prompts * 2, sampling_params=params, use_tqdm=False)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention)
        for prompt, output in zip(prompts * 2, outputs, strict=True):
            generated = list(output.outputs[0].token_ids)
            logits = model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
            assert generated == logits.argmax(-1).tolist()

    return check

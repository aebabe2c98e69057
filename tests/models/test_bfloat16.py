"""bfloat16 against float32: how often the likeliest token is the same, beside transformers' own."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, SamplingParams
from pagedserve.models.load.convert import converted_directory
from pagedserve.models.load.sources import resolve_model

NUM_REQUESTS = 64
NUM_TOKENS = 24


def ours(sequences: list[list[int]]) -> list[list[int]]:
    """The likeliest token after each of the sequences' last tokens, of our bfloat16."""
    llm = LLM(model="smollm2", dtype="bfloat16", num_gpu_blocks=2048)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = []
    for output in llm.generate(prompt_token_ids=sequences, sampling_params=asked, use_tqdm=False):
        entries = (output.prompt_logprobs or [])[1 - NUM_TOKENS :]
        likeliest = [
            next(token for token, logprob in (entry or {}).items() if logprob.rank == 1)
            for entry in entries
        ]
        found.append([*likeliest, *output.outputs[0].token_ids])
    return found


def theirs(sequences: list[list[int]]) -> list[list[int]]:
    """The same of transformers' bfloat16."""
    directory = converted_directory(resolve_model("smollm2").path)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        return [
            model(torch.tensor([sequence])).logits[0, -NUM_TOKENS:].argmax(dim=-1).tolist()
            for sequence in sequences
        ]


@pytest.mark.nightly
def test_bfloat16_agrees_with_float32_at_least_as_often_as_transformers(
    smollm2: LLM, licence: list[int]
) -> None:
    prompts = [licence[31 * index :][: 8 + 2 * index] for index in range(NUM_REQUESTS)]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = smollm2.generate(prompt_token_ids=prompts, sampling_params=greedy, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    # All of them see the same text before each token: one difference does not lead to others.
    sequences = [prompt + made[:-1] for prompt, made in zip(prompts, tokens, strict=True)]

    def num_equal(found: list[list[int]]) -> int:
        return sum(
            token_id == expected
            for pair in zip(found, tokens, strict=True)
            for token_id, expected in zip(*pair, strict=True)
        )

    with_ours, with_theirs = num_equal(ours(sequences)), num_equal(theirs(sequences))
    assert with_ours >= with_theirs
    assert with_ours >= 0.97 * NUM_REQUESTS * NUM_TOKENS

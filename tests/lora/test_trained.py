"""The trained adapter of examples/, over the real model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from pagedserve import LLM, LoRARequest, SamplingParams

DIRECTORY = Path(__file__).parents[2] / "examples/adapters/pirate"
QUESTIONS = ("Why do birds sing?", "How do I bake bread?", "What is the capital of Italy?")
PARAMS = SamplingParams(temperature=0, max_tokens=16, logprobs=0)


@pytest.fixture(scope="module")
def llm(model_package: None) -> LLM:
    return LLM("smollm2", dtype="float32", enable_lora=True, num_gpu_blocks=64)


def test_a_trained_adapter_speaks_its_way_beside_the_model(llm: LLM, peer: Any) -> None:
    pirate = LoRARequest("pirate", 1, str(DIRECTORY))
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS for _ in range(2)]
    outputs = llm.chat(talks, PARAMS, lora_request=[pirate, None] * len(QUESTIONS), use_tqdm=False)
    adapted = PeftModel.from_pretrained(copy.deepcopy(peer), str(DIRECTORY)).eval()
    for output in outputs:
        (completion,) = output.outputs
        assert completion.text.startswith("Arr,") is (output.lora_request is pirate)
        oracle = adapted if output.lora_request is pirate else peer
        tokens = torch.tensor([[*output.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logprobs = oracle(tokens[:, :-1]).logits[0].log_softmax(-1)
        ours = [
            entries[token].logprob
            for token, entries in zip(completion.token_ids, completion.logprobs or [], strict=True)
        ]
        theirs = logprobs[-len(ours) :].gather(1, tokens[0, -len(ours) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=0, atol=1e-4)

"""The trained adapter of examples/, over the real model."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from pagedserve import LLM, LoRARequest, RequestOutput, SamplingParams
from pagedserve.config.precision import ModelDtype, Quantization
from tests.support.lora import rounded

DIRECTORY = Path(__file__).parents[2] / "examples/adapters/pirate"
QUESTIONS = ("Why do birds sing?", "How do I bake bread?", "What is the capital of Italy?")
PARAMS = SamplingParams(temperature=0, max_tokens=16, logprobs=0)


@dataclass(frozen=True)
class Oracle:
    """The model as the engine holds it, alone and with the adapter of peft."""

    base: Any
    adapted: Any

    @classmethod
    def over(cls, base: Any) -> "Oracle":
        return cls(base, PeftModel.from_pretrained(copy.deepcopy(base), str(DIRECTORY)).eval())

    @torch.no_grad()
    def logprobs(self, output: RequestOutput) -> Tensor:
        """Of the tokens that an output has."""
        token_ids = output.outputs[0].token_ids
        tokens = torch.tensor([[*output.prompt_token_ids, *token_ids]])
        model = self.base if output.lora_request is None else self.adapted
        logits: Tensor = model(tokens[:, :-1]).logits[0, -len(token_ids) :].double()
        return logits.log_softmax(-1).gather(1, tokens[0, -len(token_ids) :, None])[:, 0]


def answers(dtype: ModelDtype, quantization: Quantization | None = None) -> list[RequestOutput]:
    """To each question, with the adapter and without."""
    llm = LLM(
        "smollm2", dtype=dtype, quantization=quantization, enable_lora=True, num_gpu_blocks=64
    )
    pirate = LoRARequest("pirate", 1, str(DIRECTORY))
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS for _ in range(2)]
    outputs = llm.chat(talks, PARAMS, lora_request=[pirate, None] * len(QUESTIONS), use_tqdm=False)
    for output in outputs:
        (completion,) = output.outputs
        assert completion.text.startswith("Arr,") is (output.lora_request is pirate)
    return outputs


def found(output: RequestOutput) -> Tensor:
    (completion,) = output.outputs
    entries = zip(completion.token_ids, completion.logprobs or [], strict=True)
    return torch.tensor([known[token].logprob for token, known in entries], dtype=torch.float64)


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_a_trained_adapter_speaks_its_way_beside_the_model(
    peer: Any, quantization: Quantization | None
) -> None:
    oracle = Oracle.over(rounded(peer, torch.float32, quantization))
    for output in answers("float32", quantization):
        torch.testing.assert_close(found(output), oracle.logprobs(output), rtol=0, atol=1e-4)


# Every day float32 as above, and rounded weights on a tiny model (test_apply.py).
@pytest.mark.slow
def test_a_trained_adapter_in_bfloat16_is_as_near_to_float64_as_peft(peer: Any) -> None:
    base = rounded(peer, torch.bfloat16, None)
    theirs, exact = Oracle.over(base), Oracle.over(copy.deepcopy(base).double())
    errors = []
    for output in answers("bfloat16"):
        expected = exact.logprobs(output)
        errors.append(torch.stack((found(output), theirs.logprobs(output))) - expected)
    # Over all tokens: the worst of a hundred says more of that token than of the arithmetic.
    ours, noise = torch.cat(errors, dim=1).square().mean(dim=1).sqrt()
    assert ours <= 2 * noise

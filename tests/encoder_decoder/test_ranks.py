"""Encoder-decoders on ranks give what ``transformers.generate`` gives of each prompt alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from pagedserve import LLM, SamplingParams
from tests.encoder_decoder.conftest import MakeFamily, prompts
from tests.encoder_decoder.test_generate import GREEDY, generate

SCORED = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
DRAWN = SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=12)
# Memory so short that requests are swapped, and prompts of decoders in chunks.
TIGHT: dict[str, Any] = {
    "num_gpu_blocks": 40,
    "max_num_seqs": 4,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 8,
    "preemption_mode": "swap",
    "swap_space": 0.01,
}


@pytest.mark.parametrize(
    "name", ["bart", *(pytest.param(name, marks=pytest.mark.slow) for name in ("marian", "mbart"))]
)
def test_ranks_give_the_tokens_of_one_process(family: MakeFamily, name: str) -> None:
    model, given = family(name), prompts(12)
    expected = [model.generate(prompt, 20) for prompt in given]
    others = [prompt for prompt in given for _ in range(2)]
    params = [SCORED, DRAWN] * len(given)
    wanted = generate(model.load(**TIGHT), others, params)
    shared = model.load(tensor_parallel_size=2, **TIGHT)
    try:
        assert generate(shared, given, GREEDY) == expected
        assert generate(shared, others, params) == wanted
    finally:
        shared.llm_engine.shutdown()


@pytest.mark.slow
def test_three_ranks_share_six_heads(family: MakeFamily, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(family("bart").directory)
    config.update({"d_model": 96, "encoder_attention_heads": 6, "decoder_attention_heads": 6})
    model: Any = AutoModelForSeq2SeqLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(tmp_path)
    for file in family("bart").directory.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    options: dict[str, Any] = {"generation_config": "vllm", "use_tqdm_on_load": False}
    options |= {"max_model_len": 64, "num_gpu_blocks": 256}
    found = []
    for size in (1, 3):
        llm = LLM(str(tmp_path), tensor_parallel_size=size, **options)
        found.append(generate(llm, [{"prompt_token_ids": prompt} for prompt in prompts(6)], GREEDY))
        llm.llm_engine.shutdown()
    assert found[0] == found[1]

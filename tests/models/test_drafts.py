"""Draft tokens change no token where layers keep a window, on any backend, in either precision."""

from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM, ConfigError, RequestOutput, SamplingParams, TokensPrompt
from tests.support.drafts import NGRAM, Noise, drafting

WINDOW, NUM_TOKENS = 16, 40
LAYERS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "head_dim": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": LAYERS,  # blocks of their own for half of the layers
    "mistral": {"sliding_window": WINDOW},  # a ring
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
PROMPTS: list[TokensPrompt] = [
    {"prompt_token_ids": [(number * 31 + index * 17) % 90 + 3 for index in range(length)]}
    for number, length in enumerate((50, 3, 33, 12))
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True),
]
CHUNKS: dict[str, Any] = {"enable_chunked_prefill": True, "max_num_batched_tokens": 40}
TIGHT: dict[str, Any] = {"num_gpu_blocks": 64, "watermark": 0.0, "preemption_mode": "recompute"}


def engine_of(model: Path, **options: Any) -> LLM:
    given: dict[str, Any] = {"num_gpu_blocks": 400, "dtype": "float32", "block_size": 4}
    given |= {"max_num_seqs": 24, "max_num_batched_tokens": 128}
    return LLM(str(model), **(given | options))


def answers(llm: LLM) -> list[list[list[int]]]:
    outputs: list[RequestOutput] = []
    for params in PARAMS:
        outputs += llm.generate(PROMPTS, params, use_tqdm=False)
    llm.llm_engine.scheduler.check()
    assert llm.llm_engine.scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks
    return [[list(sequence.token_ids) for sequence in output.outputs] for output in outputs]


@pytest.mark.parametrize("options", [{}, CHUNKS, TIGHT], ids=["", "chunks", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_without_draft_tokens(
    save_tiny: Any, family: str, options: dict[str, Any]
) -> None:
    directory = save_tiny(family, max_position_embeddings=128, **FAMILIES[family])
    wanted = answers(engine_of(directory, **CHUNKS))
    for proposer in (None, Noise({}, 0)):
        llm = drafting(engine_of(directory, speculative_config=NGRAM, **options), proposer)
        assert answers(llm) == wanted
        assert llm.llm_engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_kernels": "generic"},
        {"cpu_kernels": "modules"},
        {"attention_backend": "torch"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "cpu_kernels": "generic"},
    ],
    ids=str,
)
def test_so_they_are_on_every_backend(save_tiny: Any, options: dict[str, Any]) -> None:
    directory = save_tiny("llama", max_position_embeddings=128)
    wanted = answers(engine_of(directory, **options))
    llm = drafting(engine_of(directory, speculative_config=NGRAM, **options), Noise({}, 0))
    assert answers(llm) == wanted


def test_a_model_that_cannot_go_back_is_refused_by_name(save_tiny: Any) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config is .* state of the whole sequence"):
        engine_of(save_tiny("mamba"), speculative_config=NGRAM)

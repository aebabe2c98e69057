"""Layers with a window or chunks have KV blocks of their own where others see everything.

The tokens are those of transformers, and those of an engine whose layers share blocks, whatever
else the memory does; a sequence takes what its windows or chunks show.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, RequestOutput, SamplingParams, TokensPrompt
from tests.support.greedy import greedy_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW, BLOCK_SIZE, CHUNK, NUM_TOKENS = 16, 4, 18, 24
# Every second layer of the tiny models sees everything.
LAYERS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen2": {"use_sliding_window": True},
    "llama4_text": {
        "sliding_window": None,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 0] * 2,
        "floor_scale": 8,
        "attn_scale": 0.5,
        "head_dim": 8,
        "intermediate_size_mlp": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
# Kind of the group, and the blocks that a sequence has between steps: of the 15 tokens before the
# next, which may begin and end within a block, or of a whole chunk.
KINDS = dict.fromkeys(FAMILIES, ("window", (WINDOW - 2) // BLOCK_SIZE + 2))
KINDS["llama4_text"] = ("chunked", WINDOW // BLOCK_SIZE)
PROMPTS: list[TokensPrompt] = [
    {"prompt_token_ids": [(number * 31 + index * 17) % 90 + 3 for index in range(length)]}
    for number, length in enumerate((50, 3, 33, 12))
]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(
    n=3, temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1
)
BEAMS = SamplingParams(
    use_beam_search=True, best_of=3, n=3, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
)
WAYS = (GREEDY, SAMPLED, BEAMS)
CHUNKS: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": CHUNK,
}
MEMORIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": CHUNKS,
    "recompute": {"num_gpu_blocks": 64, "preemption_mode": "recompute", "watermark": 0.0},
    "swap": {"num_gpu_blocks": 64, "preemption_mode": "swap", "swap_space": 0.01},
    "swap in chunks": CHUNKS
    | {"num_gpu_blocks": 64, "preemption_mode": "swap", "swap_space": 0.01},
}


@pytest.fixture
def saved(save_tiny: Any, family: str) -> Path:
    directory: Path = save_tiny(family, **(LAYERS | FAMILIES[family]))
    return directory


def engine_of(model: Path, **options: Any) -> LLM:
    given: dict[str, Any] = {"num_gpu_blocks": 400, "dtype": "float32", "block_size": BLOCK_SIZE}
    given |= {"max_num_batched_tokens": 128, "max_num_seqs": 64}  # with more a step could take all
    llm = LLM(str(model), **(given | options))
    # What was never written must not be read.
    for pool in llm.llm_engine.model_executor.worker.cache.gpu_pools:  # type: ignore[attr-defined]
        pool.fill_(float("nan"))
    return llm


def answers(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    """What is said of the prompts, and nothing is left behind."""
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    scheduler = llm.llm_engine.scheduler
    scheduler.check()
    assert scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(sequence.token_ids) for sequence in output.outputs] for output in outputs]


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    return [sequence.cumulative_logprob or 0.0 for output in outputs for sequence in output.outputs]


def assert_greedy(saved: Path, outputs: list[RequestOutput]) -> None:
    """The tokens are those of transformers, whose model computes each prompt alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    for prompt, found in zip(PROMPTS, outputs, strict=True):
        wanted = greedy_tokens(model, prompt["prompt_token_ids"], NUM_TOKENS)
        assert list(found.outputs[0].token_ids) == wanted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["rust", "torch"])
def test_tokens_are_those_of_transformers(saved: Path, family: str, backend: str) -> None:
    llm = engine_of(saved, attention_backend=backend, **CHUNKS)
    [group] = llm.llm_engine.memory.groups
    assert (group.kind, group.window) == (KINDS[family][0], WINDOW)
    assert_greedy(saved, answers(llm, GREEDY))


@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text"])
def test_tokens_are_those_of_an_engine_whose_layers_share_blocks(saved: Path) -> None:
    shared = engine_of(saved, disable_hybrid_kv_cache_manager=True)
    assert shared.llm_engine.memory.groups == ()
    expected = [answers(shared, params) for params in WAYS]
    num_preempted = 0
    for options in MEMORIES.values():
        llm = engine_of(saved, **options)
        assert llm.llm_engine.memory.groups
        for params, wanted in zip(WAYS, expected, strict=True):
            found = answers(llm, params)
            assert tokens_of(found) == tokens_of(wanted)
            # Chunks end elsewhere, and a window's keys are then summed in other tiles.
            assert logprobs_of(found) == pytest.approx(logprobs_of(wanted), abs=1e-4)
        num_preempted += llm.llm_engine.scheduler.num_preemptions
    assert num_preempted > 0


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_a_sequence_takes_what_its_windows_show(
    saved: Path, family: str, caches_prefixes: bool
) -> None:
    llm = engine_of(saved, enable_prefix_caching=caches_prefixes, **CHUNKS)
    engine = llm.llm_engine
    engine.add_request("0", PROMPTS[0], GREEDY)
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        for group in engine.scheduler.running:
            for seq in engine.scheduler.seqs_of(group).tolist():
                most = max(most, len(engine.scheduler.block_table(seq, kv_group=1)))
    assert most == KINDS[family][1]
    assert engine.stats.peak_used_blocks == 19, "the others keep all 73"


@pytest.mark.parametrize("family", ["gemma3_text"])
def test_the_memory_is_shared_out(saved: Path) -> None:
    given: dict[str, Any] = {"num_gpu_blocks": None, "kv_cache_memory": 1 << 20, **CHUNKS}
    memory = engine_of(saved, **given).llm_engine.memory
    [group] = memory.groups
    taken = memory.pool_bytes + memory.group_pool_bytes
    assert (1 << 20) - memory.block_bytes < taken <= 1 << 20
    assert memory.group_pool_bytes <= 1 << 19
    assert f"{group.num_gpu_blocks} blocks x " in memory.describe()
    shared = engine_of(saved, **given, disable_hybrid_kv_cache_manager=True).llm_engine.memory
    assert shared.num_gpu_blocks < memory.num_gpu_blocks
    # A step of 2048 tokens may write more than that half.
    whole = given | {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
    assert engine_of(saved, **whole).llm_engine.memory.groups == ()


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
def test_tokens_after_cached_prefixes_are_those_of_transformers(saved: Path) -> None:
    llm = engine_of(saved, enable_prefix_caching=True, **CHUNKS)
    for num_cached in ([0, 0, 0, 0], [48, 0, 32, 8]):
        outputs = answers(llm, GREEDY)
        assert [output.num_cached_tokens for output in outputs] == num_cached
        assert_greedy(saved, outputs)


@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text"])
def test_cached_prefixes_change_no_token(saved: Path) -> None:
    shared = engine_of(saved, disable_hybrid_kv_cache_manager=True)
    expected = [answers(shared, params) for params in WAYS]
    for options in MEMORIES.values():
        llm = engine_of(saved, enable_prefix_caching=True, **options)
        assert llm.llm_engine.memory.groups
        for params, wanted in zip(WAYS, expected, strict=True):
            assert llm.reset_prefix_cache()
            for _ in range(2):
                found = answers(llm, params)
                assert tokens_of(found) == tokens_of(wanted)
            num_cached = [output.num_cached_tokens for output in found]
            assert num_cached == [48, 0, 32, 8] or "num_gpu_blocks" in options


def test_layers_that_all_see_everything_share_blocks(save_tiny: Any) -> None:
    layers = LAYERS | {"layer_types": ["full_attention"] * 4}
    llm = engine_of(save_tiny("gemma3_text", **layers, head_dim=16))
    assert llm.llm_engine.memory.groups == ()

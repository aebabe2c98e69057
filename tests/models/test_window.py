"""Models whose layers all have one window keep the keys that it shows and no more.

The tokens are those of transformers, and those of an engine that keeps all keys, whatever else the
memory does.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, RequestOutput, SamplingParams
from pagedserve.inputs import TokensPrompt
from tests.support.greedy import greedy_tokens

WINDOW, BLOCK_SIZE, CHUNK, NUM_TOKENS = 16, 4, 18, 40
# Between steps the 15 tokens before the next, which may begin and end within a block.
MOST_BLOCKS = (WINDOW - 2) // BLOCK_SIZE + 2
PROMPTS: list[TokensPrompt] = [
    {"prompt_token_ids": [(number * 31 + index * 17) % 90 + 3 for index in range(length)]}
    for number, length in enumerate((50, 3, 33, 12))
]
GREEDY = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=0
)
# Every group forks; the seed is the request's own.
SAMPLED = SamplingParams(
    n=3, temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1
)


@pytest.fixture
def mistral(save_tiny: Any) -> Path:
    directory: Path = save_tiny("mistral", sliding_window=WINDOW, max_position_embeddings=128)
    return directory


def engine_of(model: Path, **options: Any) -> LLM:
    given: dict[str, Any] = {"num_gpu_blocks": 400, "max_num_seqs": CHUNK}
    given |= {"max_num_batched_tokens": CHUNK, "dtype": "float32", "block_size": BLOCK_SIZE}
    return LLM(str(model), **({"enable_chunked_prefill": True} | given | options))


def answers(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    """What is said of the prompts, and nothing is left behind."""
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    scheduler = llm.llm_engine.scheduler
    scheduler.check()
    assert scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks
    return outputs


def logprobs_of(output: RequestOutput) -> list[float]:
    """Of the sequences, and of each token of the prompt: a wrong key shows in those behind it."""
    positions = [position for position in output.prompt_logprobs or [] if position]
    of_prompt = [each.logprob for position in positions for each in position.values()]
    return [each.cumulative_logprob or 0.0 for each in output.outputs] + of_prompt


@pytest.mark.parametrize(
    ("backend", "kernels"),
    [("rust", "fused"), ("rust", "generic"), ("torch", "generic"), ("sdpa", "modules")],
)
def test_tokens_are_those_of_transformers(mistral: Path, backend: str, kernels: str) -> None:
    llm = engine_of(mistral, attention_backend=backend, cpu_kernels=kernels)
    model: Any = AutoModelForCausalLM.from_pretrained(mistral, dtype=torch.float32)
    for prompt, found in zip(PROMPTS, answers(llm, GREEDY), strict=True):
        wanted = greedy_tokens(model, prompt["prompt_token_ids"], NUM_TOKENS)
        assert list(found.outputs[0].token_ids) == wanted


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "forks"])
def test_tokens_are_those_of_an_engine_that_keeps_all(
    mistral: Path, mode: str, params: SamplingParams
) -> None:
    everything = engine_of(mistral, disable_hybrid_kv_cache_manager=True)
    # Room for two of four prompts, each of up to three sequences.
    num_blocks = 2 * (MOST_BLOCKS + 2) * params.n
    few = engine_of(mistral, num_gpu_blocks=num_blocks, preemption_mode=mode, watermark=0.0)
    expected = answers(everything, params)
    for found, wanted in zip(answers(few, params), expected, strict=True):
        assert [seq.token_ids for seq in found.outputs] == [seq.token_ids for seq in wanted.outputs]
        # Chunks end elsewhere, and a window's keys are then summed in other tiles.
        assert logprobs_of(found) == pytest.approx(logprobs_of(wanted), abs=1e-5)
    for found, wanted in zip(answers(engine_of(mistral), params), expected, strict=True):
        assert logprobs_of(found) == logprobs_of(wanted)
    assert few.llm_engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": True}, {"preemption_mode": "swap", "swap_space": 0.01}],
    ids=["window", "prefix caching", "swap"],
)
def test_a_sequence_of_any_length_takes_what_the_window_shows(
    mistral: Path, options: dict[str, Any]
) -> None:
    engine = engine_of(mistral, **options).llm_engine
    [group] = engine.memory.groups
    assert (group.kind, group.window) == ("window", WINDOW)
    assert engine.memory.block_bytes == 0, "no layer keeps all keys"
    engine.add_request("0", PROMPTS[0], GREEDY)
    most = 0
    while engine.has_unfinished_requests():
        engine.step()
        for running in engine.scheduler.running:
            for seq in engine.scheduler.seqs_of(running).tolist():
                most = max(most, len(engine.scheduler.block_table(seq, kv_group=1)))
    assert most == MOST_BLOCKS


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "forks"])
@pytest.mark.parametrize(
    "memory", [{}, {"num_gpu_blocks": 60, "preemption_mode": "swap", "swap_space": 0.01}]
)
def test_prefixes_are_found_again_and_change_no_token(
    mistral: Path, params: SamplingParams, memory: dict[str, Any]
) -> None:
    params = params.clone()
    params.prompt_logprobs = None  # asks for every token of the prompt
    wanted = answers(engine_of(mistral, disable_hybrid_kv_cache_manager=True), params)
    llm = engine_of(mistral, enable_prefix_caching=True, **memory)
    for _ in range(2):
        found = answers(llm, params)
        for ours, theirs in zip(found, wanted, strict=True):
            of = [seq.token_ids for seq in ours.outputs], [seq.token_ids for seq in theirs.outputs]
            assert of[0] == of[1]
    if not memory:
        assert [output.num_cached_tokens for output in found] == [48, 0, 32, 8]


def test_memory_is_that_of_the_window(mistral: Path) -> None:
    """The pool of 64 KiB is a fifth of what the longest sequence would keep of all its layers."""
    given: dict[str, Any] = {"num_gpu_blocks": None, "max_model_len": 128, "max_num_seqs": 1}
    memory = engine_of(mistral, **given, kv_cache_memory=1 << 16).llm_engine.memory
    [group], [block_bytes] = memory.groups, memory.group_bytes
    assert memory.pool_bytes == 0
    assert group.num_gpu_blocks * block_bytes <= 1 << 16
    kept = engine_of(mistral, disable_hybrid_kv_cache_manager=True).llm_engine.memory
    assert kept.block_bytes == block_bytes

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
from pagedserve.errors import ConfigError
from pagedserve.inputs import TokensPrompt
from tests.support.greedy import greedy_tokens

WINDOW, BLOCK_SIZE, CHUNK, NUM_TOKENS = 16, 4, 18, 40
# A step of CHUNK tokens sees WINDOW - 1 before its first: 33, one less would do with a block less.
MOST_BLOCKS = 9
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
    given = {"num_gpu_blocks": 400, "max_num_batched_tokens": CHUNK, "max_num_seqs": CHUNK}
    chunked = {"enable_chunked_prefill": True, "dtype": "float32", "block_size": BLOCK_SIZE}
    return LLM(str(model), **(chunked | given | options))


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
    ("backend", "kernels"), [("rust", "fused"), ("rust", "generic"), ("torch", "generic")]
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
    everything = engine_of(mistral, enable_prefix_caching=True)  # finds what it keeps again
    # Room for two of four prompts, each of up to three sequences.
    num_blocks = 2 * MOST_BLOCKS * params.n
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
    ("options", "most_blocks"),
    [
        ({}, MOST_BLOCKS),
        # The last of 90 tokens is never computed.
        ({"enable_prefix_caching": True}, 23),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 128}, 23),
    ],
    ids=["window", "prefix caching", "no chunks"],
)
def test_a_sequence_of_any_length_takes_what_the_window_shows(
    mistral: Path, options: dict[str, Any], most_blocks: int
) -> None:
    llm = engine_of(mistral, **options)
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert llm.llm_engine.stats.peak_used_blocks == most_blocks


def test_memory_for_what_the_window_shows_is_enough(mistral: Path) -> None:
    block_bytes = engine_of(mistral).llm_engine.memory.block_bytes
    fits: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory": MOST_BLOCKS * block_bytes}
    fits["num_gpu_blocks"] = None
    engine_of(mistral, **fits)
    with pytest.raises(ConfigError, match="one sequence of 128 tokens"):
        engine_of(mistral, **fits, enable_prefix_caching=True)

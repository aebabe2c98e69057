"""How many blocks requests of several sequences hold, against independent requests."""

from typing import Any

import pytest

from pagedserve import SamplingParams

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 200
NUM_TOKENS = 40


def peak(formula: Any, params: SamplingParams, *, num_requests: int = 1) -> int:
    """Blocks at the fullest moment of requests that all have the same prompt."""
    engine = formula.engine(num_gpu_blocks=256, block_size=BLOCK_SIZE, max_model_len=256)
    prompt = [7 * index % 256 for index in range(NUM_PROMPT_TOKENS)]
    for number in range(num_requests):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    formula.finish(engine)
    formula.check_idle(engine)
    return int(engine.stats.peak_used_blocks)


def alone(formula: Any, num_requests: int) -> int:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return peak(formula, params, num_requests=num_requests)


@pytest.mark.parametrize("width", [2, 4, 6])
def test_beams_share_the_prompts_blocks(formula: Any, width: int) -> None:
    params = SamplingParams(
        use_beam_search=True,
        temperature=0,
        best_of=width,
        n=width,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
    )
    saved = 1 - peak(formula, params) / alone(formula, width)
    full_blocks = NUM_PROMPT_TOKENS // BLOCK_SIZE
    blocks_each = -(-(NUM_PROMPT_TOKENS + NUM_TOKENS) // BLOCK_SIZE)
    assert saved >= full_blocks * (width - 1) / (blocks_each * width)
    if width == 6:
        assert saved >= 0.4


@pytest.mark.parametrize("num_samples", [2, 4, 6])
def test_samples_share_the_prompts_full_blocks(formula: Any, num_samples: int) -> None:
    params = SamplingParams(n=num_samples, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True)
    full_blocks = NUM_PROMPT_TOKENS // BLOCK_SIZE
    saved = alone(formula, num_samples) - peak(formula, params)
    assert saved >= full_blocks * (num_samples - 1)

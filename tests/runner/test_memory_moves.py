"""What the memory does is invisible in the tokens: prefix cache, chunks, swap, all at once."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedserve import _core

MakeScheduler = Callable[..., _core.Scheduler]
Run = Callable[[_core.Scheduler, list[list[int]], int], list[list[int]]]
NUM_TOKENS = 6
NUM_BLOCKS = 200

CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16}
SWAPPED = {"num_cpu_blocks": 100, "preemption_mode": "swap"}
CACHED = {"enable_prefix_caching": True}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Pairs that share 21 tokens, one twice the same, and one that shares nothing."""
    generator = np.random.default_rng(11)
    shared = generator.integers(100, 40_000, 21).tolist()
    own = [generator.integers(100, 40_000, size).tolist() for size in (1, 7, 12, 30)]
    return [shared + own[0], shared + own[1], shared + own[2], shared + own[1], own[3]]


@pytest.fixture(scope="module")
def expected(make_scheduler: MakeScheduler, run: Run, prompts: list[list[int]]) -> list[list[int]]:
    return run(make_scheduler(NUM_BLOCKS), prompts, NUM_TOKENS)


@pytest.mark.parametrize(
    "memory",
    [
        (NUM_BLOCKS, CACHED),
        (NUM_BLOCKS, CHUNKED),
        (NUM_BLOCKS, CACHED | CHUNKED),
        (22, SWAPPED),
        (16, CACHED | SWAPPED),
        (16, CACHED | CHUNKED | SWAPPED),
        (16, CACHED | CHUNKED | {"preemption_mode": "recompute", "victim_policy": "least_work"}),
    ],
)
def test_the_tokens_are_the_same_whatever_the_memory_does(
    make_scheduler: MakeScheduler,
    run: Run,
    prompts: list[list[int]],
    expected: list[list[int]],
    memory: tuple[int, dict[str, Any]],
) -> None:
    num_blocks, options = memory
    scheduler = make_scheduler(num_blocks, **options)
    assert run(scheduler, prompts, NUM_TOKENS) == expected
    if "enable_prefix_caching" in options:  # the cache is warm now
        assert run(scheduler, prompts, NUM_TOKENS) == expected
    assert scheduler.num_free_gpu_blocks == num_blocks
    scheduler.check()
    if num_blocks < NUM_BLOCKS:
        assert scheduler.num_preemptions > 0


def test_a_warm_prefix_is_not_computed_again(
    make_scheduler: MakeScheduler, run: Run, prompts: list[list[int]]
) -> None:
    scheduler = make_scheduler(NUM_BLOCKS, **CACHED)
    run(scheduler, prompts, NUM_TOKENS)
    scheduler.add_seq_group(np.array(prompts[2], dtype=np.int32), arrival_time=0.0)
    # Of 33 tokens all full blocks of 4 are known, and the last token is always computed.
    assert scheduler.schedule(time.monotonic()).num_batched_tokens == 1

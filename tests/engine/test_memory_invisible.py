"""Same answers whatever the memory does: preemptions, swaps, shared prefixes, prompts in parts.

All of it on a tiny model, log-probabilities included, bit for bit: the CPU's kernels round a row
alike in any company, so nothing has to be forgiven.  On the real model everything at once, and the
rest where there is time (slow).  So with steps that run ahead of their tokens.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from pagedserve import LLM
from tests.support.every_way import MEMORIES, NUM_REQUESTS, Model, tiny_model

MIN_SWAPS = 200
MIN_COPIES = 200

pytestmark = pytest.mark.timeout(600)


def figures(llm: LLM) -> str:
    scheduler, stats = llm.llm_engine.scheduler, llm.llm_engine.stats
    return (
        f"{stats.num_steps} steps, {scheduler.num_preemptions} preemptions, "
        f"{stats.num_swapped_blocks} blocks swapped, {stats.num_copied_blocks} copied, "
        f"{stats.peak_used_blocks} of {llm.llm_engine.memory.num_gpu_blocks} used, "
        f"{scheduler.num_cached_tokens} tokens hit"
    )


def check(model: Model, options: dict[str, Any], *, is_async: bool) -> str:
    """Run the requests, twice where the second finds their prefixes; the figures."""
    expected = model.expected(is_async=is_async)
    llm = model.load(options | {"async_scheduling": is_async})
    engine, is_shared = llm.llm_engine, "enable_prefix_caching" in options
    for _ in range(1 + is_shared):
        num_hits = engine.scheduler.num_cached_tokens
        found = model.run(llm, is_async=is_async)
        different = [number for number in range(NUM_REQUESTS) if found[number] != expected[number]]
        assert found == expected, f"requests {different} differ"
        assert (engine.scheduler.num_cached_tokens > num_hits) == is_shared
    assert (engine.scheduler.num_preemptions > 0) == ("preemption_mode" in options)
    if is_async:
        assert 15 < engine.stats.num_async_steps < engine.stats.num_steps
    elif "swap_space" in options:
        assert engine.stats.num_swapped_blocks >= MIN_SWAPS
        assert engine.stats.num_copied_blocks >= MIN_COPIES
    return figures(llm)


@pytest.fixture(scope="module")
def tiny(backend: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield from tiny_model(tmp_path_factory.mktemp("memory"), backend)


@pytest.fixture(scope="module")
def large(model_package: None, licence: list[int]) -> Model:
    return Model("smollm2", licence, [".", ",", " of", " or"], with_logprobs=False)


def test_the_tiny_model_says_much(tiny: Model) -> None:
    answers = tiny.expected(is_async=False)
    assert len({str(answer) for answer in answers}) == NUM_REQUESTS
    reasons = {said[2:4] for answer in answers for said in answer}
    assert reasons == {("length", None), ("stop", None)} | {("stop", stop) for stop in tiny.stops}


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_tiny_model_says_the_same(tiny: Model, memory: str, *, is_async: bool) -> None:
    check(tiny, MEMORIES[memory], is_async=is_async)


# Random tokens are among few, and with Gaussian noise of 1e-4 on all logits, several times what
# rounding does to them, three runs gave the same tokens as well: no choice here is a tie.
@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_real_model_says_the_same(
    large: Model, memory: str, capsys: pytest.CaptureFixture[str], *, is_async: bool
) -> None:
    said = check(large, MEMORIES[memory], is_async=is_async)
    with capsys.disabled():
        print(f"\n{said}")  # noqa: T201  # the figures are the point

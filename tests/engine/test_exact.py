"""Greedy tokens against transformers' ``generate``, one prompt at a time on the same weights."""

from collections.abc import Sequence
from typing import Any

import pytest

from pagedserve import LLM, RequestOutput, SamplingParams
from tests.support import greedy
from tests.support.examples import LOOKS_AT_ALL
from tests.support.greedy import NUM_PROMPTS, NUM_TOKENS, GreedyReference

# A first difference is nobody's fault where the reference itself hardly tells two tokens apart.
TIE_LOGITS = 1e-4
MAX_TIES = NUM_PROMPTS // 50 + 1
# So few that 48 requests preempt each other at least 20 times.
FEW_BLOCKS = 126
MIN_PREEMPTIONS = 20

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def references() -> list[GreedyReference]:
    """What transformers answered when it was asked."""
    return greedy.recorded()


def count_ties(
    references: Sequence[GreedyReference], outputs: Sequence[RequestOutput], num_tokens: int
) -> int:
    """How many prompts part from the reference at a tie; any other difference fails."""
    num_ties = 0
    for number, (expected, output) in enumerate(zip(references, outputs, strict=True)):
        found = output.outputs[0].token_ids
        assert len(found) == num_tokens
        assert output.prompt_token_ids == expected.prompt_token_ids
        pairs = enumerate(zip(found, expected.token_ids[:num_tokens], strict=True))
        first = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
        if first is not None:
            gap = expected.gaps[first]
            assert gap < TIE_LOGITS, (
                f"prompt {number} of {len(expected.prompt_token_ids)} tokens differs first at new "
                f"token {first}, where the reference's two best logits are {gap} apart"
            )
            num_ties += 1
    return num_ties


def check(
    llm: LLM,
    references: Sequence[GreedyReference],
    num_tokens: int = NUM_TOKENS,
    *,
    as_token_ids: bool = False,
) -> str:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    if as_token_ids:
        token_ids = [reference.prompt_token_ids for reference in references]
        outputs = llm.generate(None, params, prompt_token_ids=token_ids, use_tqdm=False)
    else:
        texts = [reference.text for reference in references]
        outputs = llm.generate(texts, params, use_tqdm=False)
    num_ties = count_ties(references, outputs, num_tokens)
    assert num_ties <= MAX_TIES
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks
    scheduler.check()
    return (
        f"{len(references) - num_ties} of {len(references)} prompts exact, {num_ties} ties, "
        f"{scheduler.num_preemptions} preemptions"
    )


def test_all_at_once(
    real: LLM,
    backend: Any,
    references: list[GreedyReference],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(references) == NUM_PROMPTS
    # Prompts are sorted by length, so every sixth has short and long ones; each backend takes
    # others, as tests/native/test_every_way.py shows that both answer alike.
    first = 0 if backend == "native" else 3
    # All sequences reach two more blocks.
    given = (references, NUM_TOKENS) if LOOKS_AT_ALL else (references[first::6], 33)
    said = check(real, *given)
    with capsys.disabled():
        print(f"\n{said}")  # noqa: T201  # the figure is the point


def test_prompts_may_be_token_ids(real: LLM, references: list[GreedyReference]) -> None:
    check(real, references[-4:], num_tokens=4, as_token_ids=True)


# That preemptions change no token is shown on a tiny model too (test_memory_invisible.py).
@pytest.mark.slow
def test_with_preemptions(
    backend: Any, references: list[GreedyReference], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM("smollm2", backend=backend, dtype="float32", num_gpu_blocks=FEW_BLOCKS)
    said = check(llm, references)
    assert llm.llm_engine.scheduler.num_preemptions >= MIN_PREEMPTIONS
    with capsys.disabled():
        print(f"\n{said}")  # noqa: T201  # the figure is the point

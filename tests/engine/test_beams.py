"""Beam search of several requests together against transformers', one prompt at a time.

A small choice of searches, whose answers are recorded, unless the environment variable
``PAGEDSERVE_FULL_GRID`` is set: then every width with every length penalty and every way to stop
early, on more prompts and longer, and transformers is asked as the test runs.
The answers must be the same sequences in the same order; no tie excuses a difference.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pagedserve import LLM, RequestOutput, SamplingParams
from tests.support import beams
from tests.support.beams import Answer, BeamReference, Way

IS_FULL = bool(os.environ.get("PAGEDSERVE_FULL_GRID"))
GRID = beams.FULL_GRID if IS_FULL else beams.RECORDED_GRID
# Of the small choice each width is one backend's: tests/native/test_every_way.py shows that both
# answer alike.
SEARCHES = (
    [(backend, width) for backend in ("native", "torch") for width in GRID.ways]
    if IS_FULL
    else [("native", 2), ("torch", 4), ("native", 8)]
)
BLOCK_SIZE = 16
# Of the prompts, those that preempt each other: a question and an opening, whose beams go on.
NUM_PREEMPTED = GRID.num_prompts if IS_FULL else 2

pytestmark = pytest.mark.timeout(3600 if IS_FULL else 600)


@pytest.fixture
def reference(width: int, request: pytest.FixtureRequest) -> BeamReference:
    """What transformers finds with this width."""
    if not IS_FULL:
        return beams.recorded(width)
    peer: Any = request.getfixturevalue("peer")
    smollm2: LLM = request.getfixturevalue("smollm2")
    return beams.ask_live(peer, smollm2.get_tokenizer(), GRID, width)


def with_few_blocks(reference: BeamReference, width: int, backend: Any) -> LLM:
    """An engine with hardly more blocks than the beams of one prompt fill."""
    longest = max(map(len, reference.prompts))
    num_shared = longest // BLOCK_SIZE
    num_each = -(-(longest + reference.num_tokens) // BLOCK_SIZE) - num_shared
    num_blocks = num_shared + width * num_each + 1
    return LLM(
        "smollm2",
        backend=backend,
        dtype="float32",
        num_gpu_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )


def compare(
    reference: BeamReference,
    way: Way,
    answers: Sequence[Sequence[Answer]],
    outputs: Sequence[RequestOutput],
) -> str:
    """How far scores are apart, in words; fails where sequences differ or scores too much."""
    differences, shares = [0.0], [0.0]
    for prompt, expected, output in zip(reference.prompts, answers, outputs, strict=True):
        found = output.outputs
        assert output.prompt_token_ids == prompt
        assert [ours.token_ids for ours in found] == [theirs.token_ids for theirs in expected]
        for ours, theirs in zip(found, expected, strict=True):
            has_ended = ours.token_ids[-1] == reference.eos_token_id
            assert ours.finish_reason == ("stop" if has_ended else "length")
            assert ours.cumulative_logprob is not None
            num_tokens = len(ours.token_ids)
            score = ours.cumulative_logprob / num_tokens**way.length_penalty
            differences.append(abs(score - theirs.score))
            shares.append(differences[-1] / way.tolerance(num_tokens))
    assert max(shares) < 1
    return f"scores within {max(differences):.1e}"


def search(
    llm: LLM, reference: BeamReference, width: int, way: Way, answers: list[list[Answer]]
) -> str:
    """Search all prompts together; what came out in words."""
    params = SamplingParams(
        use_beam_search=True,
        temperature=0,
        best_of=width,
        n=width,
        max_tokens=reference.num_tokens,
        **way._asdict(),
    )
    outputs = llm.generate(None, params, prompt_token_ids=reference.prompts, use_tqdm=False)
    difference = compare(reference, way, answers, outputs)
    reasons = [hypothesis.finish_reason for output in outputs for hypothesis in output.outputs]
    assert "stop" in reasons
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks
    scheduler.check()
    return (
        f"width {width}, {way}: {len(outputs)} of {len(reference.prompts)} searches exact, "
        f"{reasons.count('stop')} of {len(reasons)} hypotheses ended, {difference}"
    )


@pytest.mark.parametrize(("backend", "width"), SEARCHES, indirect=["backend"])
def test_beams_are_those_of_transformers(
    real: LLM,
    backend: Any,
    reference: BeamReference,
    width: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    some = replace(reference, prompts=reference.prompts[:NUM_PREEMPTED])
    few_blocks = with_few_blocks(some, width, backend)
    engine = few_blocks.llm_engine
    assert [way for way, _ in reference.answers] == GRID.ways[width]
    for way, answers in reference.answers:
        said = search(real, reference, width, way, answers)
        preempted, swapped = engine.scheduler.num_preemptions, engine.stats.num_swapped_blocks
        again = search(few_blocks, some, width, way, answers[:NUM_PREEMPTED])
        preempted = engine.scheduler.num_preemptions - preempted
        swapped = engine.stats.num_swapped_blocks - swapped
        assert preempted > 0
        assert swapped > 0
        figures = f"{preempted} preemptions, {swapped} blocks swapped"
        with capsys.disabled():
            print(f"\n{said}\n{again}, {figures}")  # noqa: T201  # the figures are the point

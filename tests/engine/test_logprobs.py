"""Log-probabilities against one direct forward of transformers on the same weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import pytest

from pagedserve import LLM, CompletionOutput, RequestOutput
from pagedserve.inputs import TokensPrompt
from pagedserve.outputs import Logprob
from tests.support import logprobs
from tests.support.logprobs import (
    NUM_PROMPT_TOP,
    NUM_TOKENS,
    NUM_TOP,
    SHARED_PROMPT,
    TOLERANCE,
    LogprobReferences,
    Position,
)

# A prompt and its output are 4 of them at most: three requests at a time preempt each other.
FEW_BLOCKS = 10

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def references() -> LogprobReferences:
    """What transformers said of the sequences when it was asked."""
    return logprobs.recorded()


@pytest.fixture(scope="module")
def prompts(licence: list[int]) -> list[TokensPrompt]:
    return logprobs.prompts_of(licence)


def check_entry(entry: Mapping[int, Logprob], token: int, expected: Position, num_top: int) -> None:
    """One position: what is said of ``token``, which comes next, and of the likeliest."""
    for candidate, said in entry.items():
        assert abs(said.logprob - expected.logprob(candidate, token)) < TOLERANCE
        least, most = expected.ranks(candidate, token)
        assert least <= said.rank <= most
    assert next(iter(entry)) == token
    ranked = sorted(entry, key=lambda candidate: entry[candidate].rank)[:num_top]
    assert [entry[candidate].rank for candidate in ranked] == list(range(1, num_top + 1))
    best = list(expected.best.values())[:num_top]
    assert [entry[candidate].logprob for candidate in ranked] == pytest.approx(best, abs=TOLERANCE)
    assert set(entry) == {*ranked, token}


def check_output(output: RequestOutput, references: LogprobReferences) -> None:
    """All that is said of a request's new tokens, and of its prompt if anything is."""
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        expected = references((*prompt, *completion.token_ids))
        check_completion(completion, expected[len(prompt) - 1 :])
        if output.prompt_logprobs is not None:
            check_prompt(prompt, output.prompt_logprobs, expected)


def check_completion(output: CompletionOutput, expected: Sequence[Position]) -> None:
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    chosen = []
    for token, entry, position in zip(
        output.token_ids, output.logprobs, expected[:-1], strict=True
    ):
        check_entry(entry, token, position, NUM_TOP)
        chosen.append(entry[token].logprob)
    assert output.cumulative_logprob == pytest.approx(sum(chosen), abs=TOLERANCE)


def check_prompt(
    prompt: Sequence[int],
    said: Sequence[Mapping[int, Logprob] | None],
    expected: Sequence[Position],
) -> None:
    assert len(said) == len(prompt)
    assert said[0] is None
    for place in range(1, len(prompt)):
        entry = said[place]
        assert entry is not None
        check_entry(entry, prompt[place], expected[place - 1], NUM_PROMPT_TOP)


def check_idle(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
    engine.scheduler.check()


def check(llm: LLM, prompts: list[TokensPrompt], references: LogprobReferences) -> None:
    params = logprobs.one_output_each()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, asked in zip(outputs, params, strict=True):
        (completion,) = output.outputs
        assert len(completion.token_ids) == NUM_TOKENS
        assert (output.prompt_logprobs is None) == (asked.prompt_logprobs is None)
        check_output(output, references)
    check_idle(llm)


def test_plain(real: LLM, prompts: list[TokensPrompt], references: LogprobReferences) -> None:
    check(real, prompts, references)


CHUNKED: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 16,
}


def each(*ways: str, everyday: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """Each way on each backend: these pairs every day, and the rest where there is time.

    With a tiny model test_memory_invisible.py has them all.
    """
    pairs = list(product(("native", "torch"), ways))
    marks = {pair: () if pair in everyday else (pytest.mark.slow,) for pair in pairs}
    params = [pytest.param(*pair, marks=marks[pair]) for pair in pairs]
    return pytest.mark.parametrize(("backend", "way"), params, indirect=["backend"])


# Both at once show what is wrong with either.
@each("prefix caching", "chunked", "both", everyday=[("native", "both")])
def test_shared_and_in_parts(
    backend: Any,
    way: str,
    prompts: list[TokensPrompt],
    references: LogprobReferences,
) -> None:
    shares, chunked = way != "chunked", {} if way == "prefix caching" else CHUNKED
    given: dict[str, Any] = {"enable_prefix_caching": shares} | chunked
    llm = LLM("smollm2", backend=backend, dtype="float32", num_gpu_blocks=256, **given)
    check(llm, prompts, references)
    if shares:
        num_cold = llm.llm_engine.scheduler.num_cached_tokens
        check(llm, prompts, references)
        assert llm.llm_engine.scheduler.num_cached_tokens > 2 * num_cold


@each("recompute", "swap", everyday=[("native", "recompute"), ("torch", "swap")])
def test_with_preemptions(
    backend: Any,
    way: Literal["recompute", "swap"],
    prompts: list[TokensPrompt],
    references: LogprobReferences,
) -> None:
    llm = LLM(
        "smollm2",
        backend=backend,
        dtype="float32",
        num_gpu_blocks=FEW_BLOCKS,
        preemption_mode=way,
    )
    check(llm, prompts, references)
    assert llm.llm_engine.scheduler.num_preemptions > 0
    assert (llm.llm_engine.stats.num_swapped_blocks > 0) == (way == "swap")


def test_several_outputs_each_have_their_own(
    real: LLM, prompts: list[TokensPrompt], references: LogprobReferences
) -> None:
    (output,) = real.generate(prompts[SHARED_PROMPT], logprobs.SEVERAL, use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 2
    check_output(output, references)
    check_idle(real)


def test_the_best_of_several_are_the_likeliest(
    real: LLM, prompts: list[TokensPrompt], references: LogprobReferences
) -> None:
    prompt, best = prompts[SHARED_PROMPT], logprobs.BEST_TWO
    all_four, best_two = real.generate([prompt] * 2, [logprobs.FOUR, best], use_tqdm=False)
    ranked = sorted(all_four.outputs, key=summed, reverse=True)
    likeliest = [completion.token_ids for completion in ranked[:2]]
    assert summed(ranked[1]) - summed(ranked[2]) > TOLERANCE  # no tie that rounding could turn
    assert [completion.index for completion in best_two.outputs] == [0, 1]
    assert [completion.token_ids for completion in best_two.outputs] == likeliest
    check_output(best_two, references)
    silent = replace(best, logprobs=None)
    (output,) = real.generate(prompt, silent, use_tqdm=False)
    assert [completion.token_ids for completion in output.outputs] == likeliest
    assert [completion.logprobs for completion in output.outputs] == [None, None]
    check_idle(real)


def test_beams_sum_their_tokens(
    real: LLM, prompts: list[TokensPrompt], references: LogprobReferences
) -> None:
    (output,) = real.generate(prompts[SHARED_PROMPT], logprobs.BEAMS, use_tqdm=False)
    assert output.prompt_logprobs is not None
    check_output(output, references)
    scores = [summed(hypothesis) / len(hypothesis.token_ids) for hypothesis in output.outputs]
    assert scores == sorted(scores, reverse=True)
    check_idle(real)


def summed(output: CompletionOutput) -> float:
    assert output.cumulative_logprob is not None
    return output.cumulative_logprob

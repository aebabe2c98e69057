"""Log-probabilities against one direct forward of transformers on the same weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pagedserve import LLM, CompletionOutput, RequestOutput, SamplingParams
from pagedserve.inputs import TokensPrompt
from pagedserve.outputs import Logprob

TOLERANCE = 1e-4
NUM_TOP, NUM_PROMPT_TOP = 5, 3
NUM_PROMPTS = 8
NUM_TOKENS = 10
# A prompt and its output are 4 of them at most: three requests at a time preempt each other.
FEW_BLOCKS = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GREEDY = SamplingParams(
    temperature=0,
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
    logprobs=NUM_TOP,
    prompt_logprobs=NUM_PROMPT_TOP,
)
RANDOM: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 7, "max_tokens": NUM_TOKENS}
SAMPLED = SamplingParams(**RANDOM, ignore_eos=True, logprobs=NUM_TOP)
# In turn for the prompts: with and without log-probabilities of the prompt.
PARAMS = (
    GREEDY,
    SAMPLED,
    replace(GREEDY, prompt_logprobs=None),
    replace(SAMPLED, prompt_logprobs=NUM_PROMPT_TOP),
)

Forward = Callable[[tuple[int, ...]], Tensor]


@pytest.fixture(scope="module")
def forward(peer: Any) -> Forward:
    """Token ids, L of them, to the log-probabilities [L, V] of what follows each."""

    @torch.inference_mode()
    def logprobs(token_ids: tuple[int, ...]) -> Tensor:
        logits: Tensor = peer(torch.tensor([token_ids])).logits[0]
        return logits.log_softmax(dim=-1)

    return cache(logprobs)  # every configuration asks the same


@pytest.fixture(scope="module")
def prompts(licence: list[int]) -> list[TokensPrompt]:
    """From 3 to 43 tokens; all but the first begin with the same 20."""
    begin = licence[:20]
    others = [begin + licence[60 * n : 60 * n + 3 * n + 2] for n in range(1, NUM_PROMPTS)]
    return [{"prompt_token_ids": one} for one in [licence[100:103], *others]]


def check_entry(entry: Mapping[int, Logprob], token: int, expected: Tensor, num_top: int) -> None:
    """One position: [V] log-probabilities, and what is said of ``token`` and of the likeliest."""
    for one, said in entry.items():
        true = expected[one]
        assert abs(said.logprob - true) < TOLERANCE
        least = 1 + int((expected > true + TOLERANCE).sum())
        most = int((expected >= true - TOLERANCE).sum())
        assert least <= said.rank <= most
    ranked = list(entry)[:num_top]
    assert [entry[one].rank for one in ranked] == list(range(1, num_top + 1))
    best = expected.topk(num_top).values
    assert [entry[one].logprob for one in ranked] == pytest.approx(best.tolist(), abs=TOLERANCE)
    assert set(entry) == {*ranked, token}


def check_output(output: RequestOutput, forward: Forward) -> None:
    """All that is said of a request's new tokens, and of its prompt if anything is."""
    prompt = output.prompt_token_ids
    for one in output.outputs:
        expected = forward((*prompt, *one.token_ids))
        check_completion(one, expected[len(prompt) - 1 :])
        if output.prompt_logprobs is not None:
            check_prompt(prompt, output.prompt_logprobs, expected)


def check_completion(output: CompletionOutput, expected: Tensor) -> None:
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    chosen = []
    for token, entry, row in zip(output.token_ids, output.logprobs, expected[:-1], strict=True):
        check_entry(entry, token, row, NUM_TOP)
        chosen.append(entry[token].logprob)
    assert output.cumulative_logprob == pytest.approx(sum(chosen), abs=TOLERANCE)


def check_prompt(
    prompt: Sequence[int], said: Sequence[Mapping[int, Logprob] | None], expected: Tensor
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


def check(llm: LLM, prompts: list[TokensPrompt], forward: Forward) -> None:
    params = [PARAMS[number % len(PARAMS)] for number in range(NUM_PROMPTS)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, own in zip(outputs, params, strict=True):
        (completion,) = output.outputs
        assert len(completion.token_ids) == NUM_TOKENS
        assert (output.prompt_logprobs is None) == (own.prompt_logprobs is None)
        check_output(output, forward)
    check_idle(llm)


def test_plain(smollm2: LLM, prompts: list[TokensPrompt], forward: Forward) -> None:
    check(smollm2, prompts, forward)


CHUNKED: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 16,
}


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True},
        CHUNKED,
        {"enable_prefix_caching": True} | CHUNKED,
    ],
    ids=["prefix caching", "chunked", "both"],
)
def test_shared_and_in_parts(
    options: dict[str, Any], prompts: list[TokensPrompt], forward: Forward
) -> None:
    llm = LLM("smollm2", dtype="float32", num_gpu_blocks=256, **options)
    check(llm, prompts, forward)
    if "enable_prefix_caching" in options:
        num_cold = llm.llm_engine.scheduler.num_cached_tokens
        check(llm, prompts, forward)
        assert llm.llm_engine.scheduler.num_cached_tokens > 2 * num_cold


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_with_preemptions(
    mode: Literal["recompute", "swap"], prompts: list[TokensPrompt], forward: Forward
) -> None:
    llm = LLM("smollm2", dtype="float32", num_gpu_blocks=FEW_BLOCKS, preemption_mode=mode)
    check(llm, prompts, forward)
    assert llm.llm_engine.scheduler.num_preemptions > 0
    assert (llm.llm_engine.stats.num_swapped_blocks > 0) == (mode == "swap")


def test_several_outputs_each_have_their_own(
    smollm2: LLM, prompts: list[TokensPrompt], forward: Forward
) -> None:
    prompt = prompts[5]
    params = SamplingParams(**RANDOM, n=2, logprobs=NUM_TOP)
    (output,) = smollm2.generate(prompt, params, use_tqdm=False)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 2
    check_output(output, forward)
    check_idle(smollm2)


def test_the_best_of_several_are_the_likeliest(
    smollm2: LLM, prompts: list[TokensPrompt], forward: Forward
) -> None:
    prompt = prompts[5]
    several = SamplingParams(**RANDOM, n=4, logprobs=NUM_TOP)
    best = SamplingParams(**RANDOM, n=2, best_of=4, logprobs=NUM_TOP)
    all_four, best_two = smollm2.generate([prompt] * 2, [several, best], use_tqdm=False)
    ranked = sorted(all_four.outputs, key=summed, reverse=True)
    assert summed(ranked[1]) - summed(ranked[2]) > TOLERANCE  # no tie that rounding could turn
    assert [one.index for one in best_two.outputs] == [0, 1]
    assert [one.token_ids for one in best_two.outputs] == [one.token_ids for one in ranked[:2]]
    check_output(best_two, forward)
    silent = replace(best, logprobs=None)
    (output,) = smollm2.generate(prompt, silent, use_tqdm=False)
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in ranked[:2]]
    assert [one.logprobs for one in output.outputs] == [None, None]
    check_idle(smollm2)


def test_beams_sum_their_tokens(
    smollm2: LLM, prompts: list[TokensPrompt], forward: Forward
) -> None:
    prompt = prompts[5]
    params = SamplingParams(
        n=4,
        best_of=4,
        use_beam_search=True,
        temperature=0,
        max_tokens=NUM_TOKENS,
        logprobs=NUM_TOP,
        prompt_logprobs=NUM_PROMPT_TOP,
    )
    (output,) = smollm2.generate(prompt, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    check_output(output, forward)
    scores = [summed(one) / len(one.token_ids) for one in output.outputs]
    assert scores == sorted(scores, reverse=True)
    check_idle(smollm2)


def summed(output: CompletionOutput) -> float:
    assert output.cumulative_logprob is not None
    return output.cumulative_logprob

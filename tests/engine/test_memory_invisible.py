"""Same tokens whatever the memory does: preemptions, swaps, shared prefixes, prompts in parts.

Rows round differently in other company, so a token could differ where the choice is as good as
even.  None of these choices is: random ones are among few tokens, and with Gaussian noise of 1e-4
on all logits, several times what rounding does to them, three runs gave the same tokens as well
(with 1e-2 one request in five changes).  So nothing has to be forgiven.
"""

from typing import Any

import pytest

from pagedserve import LLM, RequestOutput, SamplingParams
from pagedserve.inputs import TokensPrompt

NUM_REQUESTS = 64
NUM_TOKENS = 14
BLOCK_SIZE = 8
# Room for three or four requests of four sequences: they preempt each other all the time.
FEW_BLOCKS = 56
MIN_SWAPS = 200
MIN_COPIES = 200
SHARED_PREFIX = 28

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Of each sequence all that a caller is told.
Answer = list[tuple[list[int], str, object, object]]


def params_of(number: int) -> SamplingParams:
    """Every way of decoding, by the request's number."""
    given: dict[str, Any] = {"max_tokens": NUM_TOKENS - number % 5, "ignore_eos": number % 7 > 0}
    random = {"temperature": 0.8, "top_k": 12, "seed": 100 + number}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"n": 4} | random,
        {"n": 2 + number % 3, "best_of": 4, "use_beam_search": True, "temperature": 0},
        random | {"top_p": 0.9},
        {"temperature": 0, "stop": [" the", ","], "min_tokens": 3} | penalties,
        {"n": 4, "stop": [" of", " or"], "include_stop_str_in_output": True} | random,
        {
            "n": 4,
            "best_of": 4,
            "use_beam_search": True,
            "temperature": 0,
            "stop": ["."],
            "length_penalty": 0.7,
            "repetition_penalty": 1.1,
        },
        {"n": 2, "best_of": 4, "top_p": 0.8} | random | penalties,
    ]
    return SamplingParams(**(given | kinds[number % len(kinds)]))


@pytest.fixture(scope="module")
def prompts(licence: list[int]) -> list[TokensPrompt]:
    """Of 10 to 58 tokens; half share a beginning."""
    made: list[TokensPrompt] = []
    for number in range(NUM_REQUESTS):
        start = 50 + number * 29
        own = licence[start : start + 10 + number * 7 % 21]
        shared = licence[:SHARED_PREFIX] if number // 8 % 2 else []
        made.append({"prompt_token_ids": shared + own})
    return made


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    return [
        [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in output.outputs]
        for output in outputs
    ]


def run(llm: LLM, prompts: list[TokensPrompt]) -> list[Answer]:
    params = [params_of(number) for number in range(NUM_REQUESTS)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    engine = llm.llm_engine
    assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
    assert engine.scheduler.num_free_cpu_blocks == engine.memory.num_cpu_blocks
    engine.scheduler.check()
    return answers(outputs)


@pytest.fixture(scope="module")
def expected(smollm2: LLM, prompts: list[TokensPrompt]) -> list[Answer]:
    num_preemptions = smollm2.llm_engine.scheduler.num_preemptions
    found = run(smollm2, prompts)
    assert smollm2.llm_engine.scheduler.num_preemptions == num_preemptions
    return found


def chunks_of(num_tokens: int) -> dict[str, Any]:
    return {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": num_tokens,
        "max_num_seqs": min(num_tokens, 256),
    }


AMPLE: dict[str, Any] = {"num_gpu_blocks": 1024, "block_size": BLOCK_SIZE}
TIGHT: dict[str, Any] = {"num_gpu_blocks": FEW_BLOCKS, "block_size": BLOCK_SIZE}
# What is computed again takes its time: a little more room.
RECOMPUTE: dict[str, Any] = TIGHT | {"num_gpu_blocks": 84, "preemption_mode": "recompute"}
SWAP: dict[str, Any] = TIGHT | {"preemption_mode": "swap", "swap_space": 0.25}
SHARED: dict[str, Any] = {"enable_prefix_caching": True}


def figures(llm: LLM) -> str:
    scheduler, stats = llm.llm_engine.scheduler, llm.llm_engine.stats
    return (
        f"{stats.num_steps} steps, {scheduler.num_preemptions} preemptions, "
        f"{stats.num_swapped_blocks} blocks swapped, {stats.num_copied_blocks} copied, "
        f"{stats.peak_used_blocks} of {llm.llm_engine.memory.num_gpu_blocks} used, "
        f"{scheduler.num_cached_tokens} tokens hit"
    )


@pytest.mark.parametrize(
    ("options", "num_calls"),
    [
        (RECOMPUTE, 1),
        (SWAP, 1),
        (AMPLE | SHARED, 2),
        (chunks_of(16) | AMPLE, 1),
        (chunks_of(64) | AMPLE, 1),
        (chunks_of(512) | AMPLE, 1),
        (SWAP | SHARED | chunks_of(64), 2),
    ],
    ids=["recompute", "swap", "prefixes", "chunks16", "chunks64", "chunks512", "all at once"],
)
def test_the_tokens_are_the_same(
    options: dict[str, Any],
    num_calls: int,
    prompts: list[TokensPrompt],
    expected: list[Answer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    llm = LLM("smollm2", dtype="float32", **options)
    engine = llm.llm_engine
    said = []
    for _ in range(num_calls):
        num_hits = engine.scheduler.num_cached_tokens
        found = run(llm, prompts)
        different = [number for number in range(NUM_REQUESTS) if found[number] != expected[number]]
        assert found == expected, f"requests {different} differ"
        shares = "enable_prefix_caching" in options
        assert (engine.scheduler.num_cached_tokens > num_hits) == shares
        said.append(figures(llm))
    assert (engine.scheduler.num_preemptions > 0) == ("preemption_mode" in options)
    if "swap_space" in options:
        assert engine.stats.num_swapped_blocks >= MIN_SWAPS
        assert engine.stats.num_copied_blocks >= MIN_COPIES
    with capsys.disabled():
        print("", *said, sep="\n")  # noqa: T201  # the figures are the point

"""Same answers whatever the memory does: preemptions, swaps, shared prefixes, prompts in parts.

All of it on a tiny model, log-probabilities included, bit for bit: the CPU's kernels round a row
alike in any company, so nothing has to be forgiven.  On the real model everything at once, and the
rest where there is time (slow).  So with steps that run ahead of their tokens.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedserve import LLM, RequestOutput, SamplingParams
from pagedserve.inputs import TokensPrompt
from tests.support.tiny import VOCAB_SIZE, save_tiny_llama

NUM_REQUESTS = 64
NUM_TOKENS = 14
BLOCK_SIZE = 8
# Room for three or four requests of four sequences: they preempt each other all the time.
FEW_BLOCKS = 56
MIN_SWAPS = 200
MIN_COPIES = 200
SHARED_PREFIX = 28

pytestmark = pytest.mark.timeout(600)

# Of each sequence all that a caller is told.
Answer = list[tuple[object, ...]]
ASYNC: dict[str, Any] = {"async_scheduling": True}


def every_way(number: int, stops: list[str]) -> SamplingParams:
    """Every way of decoding, by the request's number."""
    given: dict[str, Any] = {"max_tokens": NUM_TOKENS - number % 5, "ignore_eos": number % 7 > 0}
    random = {"temperature": 0.8, "top_k": 12, "seed": 100 + number}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    beams: dict[str, Any] = {"best_of": 4, "use_beam_search": True, "temperature": 0}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"n": 4} | random,
        {"n": 2 + number % 3} | beams,
        random | {"top_p": 0.9},
        {"temperature": 0, "stop": stops[:2], "min_tokens": 3, "logprobs": 2} | penalties,
        {"n": 4, "stop": stops[2:], "include_stop_str_in_output": True} | random,
        {"n": 4, "stop": stops[:1], "length_penalty": 0.7, "repetition_penalty": 1.1} | beams,
        {"n": 2, "best_of": 4, "top_p": 0.8} | random | penalties,
    ]
    return SamplingParams(**(given | kinds[number % len(kinds)]))


def ways_that_run_ahead(number: int, stops: list[str]) -> SamplingParams:
    """Those whose next step can be launched before their tokens are known, but for a few."""
    given: dict[str, Any] = {"max_tokens": 24 - number % 9, "ignore_eos": number % 7 > 0}
    random = {"temperature": 0.8, "top_k": 12, "seed": 100 + number}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        random,
        {"temperature": 0, "stop": stops[:2]},
        random | {"top_p": 0.9, "stop": stops[2:]},
        {"temperature": 0, "logprobs": 1, "max_tokens": 3},  # no step runs ahead meanwhile
    ]
    return SamplingParams(**(given | kinds[number % len(kinds)]))


class Model:
    """A model, its prompts of 10 to 58 tokens, half of which share a beginning, and its answers.

    Attributes:
        name: What `LLM` loads.
        stops: Texts that end some of the sequences.
        with_logprobs: Whether log-probabilities must be the same, bit for bit.
    """

    def __init__(
        self, name: str, source: list[int], stops: list[str], *, with_logprobs: bool
    ) -> None:
        self.name, self.stops, self.with_logprobs = name, stops, with_logprobs
        self._prompts: list[TokensPrompt] = []
        for number in range(NUM_REQUESTS):
            start = 50 + number * 29
            own = source[start : start + 10 + number * 7 % 21]
            shared = source[:SHARED_PREFIX] if number // 8 % 2 else []
            self._prompts.append({"prompt_token_ids": shared + own})
        self._expected: dict[bool, list[Answer]] = {}

    def load(self, options: dict[str, Any]) -> LLM:
        return LLM(self.name, dtype="float32", block_size=BLOCK_SIZE, **options)

    def run(self, llm: LLM, *, is_async: bool) -> list[Answer]:
        """All that is said of all requests, run together."""
        params_of = ways_that_run_ahead if is_async else every_way
        params = [params_of(number, self.stops) for number in range(NUM_REQUESTS)]
        outputs = llm.generate(self._prompts, params, use_tqdm=False)
        engine = llm.llm_engine
        assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
        assert engine.scheduler.num_free_cpu_blocks == engine.memory.num_cpu_blocks
        engine.scheduler.check()
        num_said = None if self.with_logprobs else -2
        return [[said[:num_said] for said in said_of(output)] for output in outputs]

    def expected(self, *, is_async: bool) -> list[Answer]:
        """With memory for everybody, and no step before the tokens of the last are known."""
        if is_async not in self._expected:
            llm = self.load(AMPLE | {"async_scheduling": False})
            self._expected[is_async] = self.run(llm, is_async=is_async)
            assert llm.llm_engine.scheduler.num_preemptions == 0
            assert llm.llm_engine.stats.num_async_steps == 0
        return self._expected[is_async]


def said_of(output: RequestOutput) -> Answer:
    return [
        (
            completion.token_ids,
            completion.text,
            completion.finish_reason,
            completion.stop_reason,
            completion.cumulative_logprob,
            completion.logprobs,
        )
        for completion in output.outputs
    ]


def chunks_of(num_tokens: int) -> dict[str, Any]:
    return {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": num_tokens,
        "max_num_seqs": min(num_tokens, 256),
    }


AMPLE: dict[str, Any] = {"num_gpu_blocks": 1024}
TIGHT: dict[str, Any] = {"num_gpu_blocks": FEW_BLOCKS}
# What is computed again takes its time: a little more room.
RECOMPUTE: dict[str, Any] = TIGHT | {"num_gpu_blocks": 84, "preemption_mode": "recompute"}
SWAP: dict[str, Any] = TIGHT | {"preemption_mode": "swap", "swap_space": 0.25}
SHARED: dict[str, Any] = {"enable_prefix_caching": True}
ALL_AT_ONCE = SWAP | SHARED | chunks_of(64)
MEMORIES: dict[str, dict[str, Any]] = {
    "recompute": RECOMPUTE,
    "swap": SWAP,
    "prefixes": AMPLE | SHARED,
    "chunks16": AMPLE | chunks_of(16),
    "chunks64": AMPLE | chunks_of(64),
    "chunks512": AMPLE | chunks_of(512),
    "all at once": ALL_AT_ONCE,
}


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
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Its words are w1 to w96; each of the stops is in some of them, or in some pairs."""
    folder = tmp_path_factory.mktemp("memory")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several only wait for each other in steps this small
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDSERVE_CACHE", str(folder / "cache"))
        source = [3 + number * number * 31 % 7919 % (VOCAB_SIZE - 3) for number in range(2000)]
        stops = ["55", "7 w", "8 w1", "40"]
        name = str(save_tiny_llama(folder / "llama"))
        yield Model(name, source, stops, with_logprobs=True)
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def real(model_package: None, licence: list[int]) -> Model:
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
    real: Model, memory: str, capsys: pytest.CaptureFixture[str], *, is_async: bool
) -> None:
    said = check(real, MEMORIES[memory], is_async=is_async)
    with capsys.disabled():
        print(f"\n{said}")  # noqa: T201  # the figures are the point

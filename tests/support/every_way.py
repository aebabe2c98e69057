"""Requests of every kind, and the memories in which an engine may serve them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pagedserve import LLM, RequestOutput, SamplingParams
from pagedserve.config.precision import Backend
from pagedserve.inputs import TokensPrompt
from tests.support.tiny import VOCAB_SIZE, save_tiny_llama

NUM_REQUESTS = 64
NUM_TOKENS = 14
BLOCK_SIZE = 8
# Room for three or four requests of four sequences: they preempt each other all the time.
FEW_BLOCKS = 56
SHARED_PREFIX = 28

# Of each sequence all that a caller is told.
Answer = list[tuple[object, ...]]


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
        {"n": 2, "best_of": 4, "top_p": 0.8, "top_n_sigma": 2.5} | random | penalties,
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
        backend: What runs it.
        prompts: As token ids.
        stops: Texts that end some of the sequences.
        with_logprobs: Whether log-probabilities must be the same, bit for bit.
    """

    def __init__(
        self,
        name: str,
        source: list[int],
        stops: list[str],
        *,
        with_logprobs: bool,
        backend: Backend = "auto",
    ) -> None:
        self.name, self.stops, self.with_logprobs = name, stops, with_logprobs
        self.backend: Backend = backend
        self.prompts: list[TokensPrompt] = []
        for number in range(NUM_REQUESTS):
            start = 50 + number * 29
            own = source[start : start + 10 + number * 7 % 21]
            shared = source[:SHARED_PREFIX] if number // 8 % 2 else []
            self.prompts.append({"prompt_token_ids": shared + own})
        self._expected: dict[bool, list[Answer]] = {}

    def load(self, options: dict[str, Any]) -> LLM:
        return LLM(
            self.name, backend=self.backend, dtype="float32", block_size=BLOCK_SIZE, **options
        )

    def run(self, llm: LLM, *, is_async: bool) -> list[Answer]:
        """All that is said of all requests, run together."""
        params_of = ways_that_run_ahead if is_async else every_way
        params = [params_of(number, self.stops) for number in range(NUM_REQUESTS)]
        outputs = llm.generate(self.prompts, params, use_tqdm=False)
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


def tiny_model(folder: Path, backend: Backend = "auto") -> Iterator[Model]:
    """Its words are w1 to w96; each of the stops is in some of them, or in some pairs."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several only wait for each other in steps this small
    source = [3 + number * number * 31 % 7919 % (VOCAB_SIZE - 3) for number in range(2000)]
    stops = ["55", "7 w", "8 w1", "40"]
    name = str(save_tiny_llama(folder / "llama"))
    yield Model(name, source, stops, with_logprobs=True, backend=backend)
    torch.set_num_threads(num_threads)

"""SmolLM2 on the native backend, against the torch backend on the same kernels."""

from typing import Any

import pytest

from pagedserve import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from pagedserve.config.precision import Backend

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was",
    "One, two, three, four, one, two, three, four, one, two,",
    "def fibonacci(n):",
]
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=3, prompt_logprobs=1)
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=7, n=2, max_tokens=16)
EDITED = SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias={5: -2.0}, max_tokens=16)
WAYS = (GREEDY, SAMPLED, EDITED)
BACKENDS: tuple[Backend, ...] = ("native", "torch")
Pair = tuple[LLM, LLM]
Answers = tuple[list[RequestOutput], list[RequestOutput]]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """The native and the torch backend."""
    name = "quantization" if request.param == "int8" else "dtype"
    given: dict[str, Any] = {name: request.param, "num_gpu_blocks": 256}
    found, expected = (LLM("smollm2", backend=backend, **given) for backend in BACKENDS)
    return found, expected


@pytest.fixture(scope="module")
def answers(pair: Pair) -> Answers:
    """Each prompt in each way, all in one batch."""
    prompts = [prompt for _ in WAYS for prompt in PROMPTS]
    params = [way for way in WAYS for _ in PROMPTS]
    found, expected = (llm.generate(prompts, params, use_tqdm=False) for llm in pair)
    return found, expected


def test_answers_are_those_of_torch(answers: Answers) -> None:
    for ours, theirs in zip(*answers, strict=True):
        for answer, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert answer.token_ids == other.token_ids
            assert answer.finish_reason == other.finish_reason
            assert answer.text == other.text


@pytest.mark.parametrize("pair", ["float32", "bfloat16"], indirect=True)
def test_sizes_of_files_and_weights_are_known(pair: Pair) -> None:
    found, expected = (llm.llm_engine.model_info for llm in pair)
    assert found.file_bytes == expected.file_bytes > 50_000_000
    assert found.weight_bytes > 50_000_000
    assert expected.weight_bytes > 50_000_000


def test_logprobs_are_those_of_torch(answers: Answers) -> None:
    found, expected = (outputs[: len(PROMPTS)] for outputs in answers)  # the greedy ones
    for ours, theirs in zip(found, expected, strict=True):
        for kept, others in (
            (ours.outputs[0].logprobs, theirs.outputs[0].logprobs),
            (ours.prompt_logprobs, theirs.prompt_logprobs),
        ):
            assert kept is not None
            assert others is not None
            for position, other in zip(kept, others, strict=True):
                assert (position is None) == (other is None)
                for token, logprob in (position or {}).items():
                    if other is not None and token in other:
                        assert logprob.logprob == other[token].logprob


def run(engine: LLMEngine, params: SamplingParams, num: int = 6) -> dict[str, list[list[int]]]:
    for number in range(num):
        engine.add_request(str(number), PROMPTS[number % len(PROMPTS)], params)
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = [list(answer.token_ids) for answer in output.outputs]
    return found


LONG = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
FORKED = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> dict[str, dict[str, list[list[int]]]]:
    """Answers of the torch backend, with memory for all."""
    engine = pair[1].llm_engine
    return {"greedy": run(engine, LONG), "forked": run(engine, FORKED)}


# With the smaller weights a step takes half as long as in float32 (tests/engine/test_logprobs.py).
@pytest.mark.parametrize("pair", ["bfloat16"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks": 10, "swap_space": 0},  # preempted sequences are computed again
        {"num_gpu_blocks": 20, "swap_space": 0.2},  # those with forks are swapped
        {"enable_prefix_caching": True},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"async_scheduling": True},
    ],
    ids=["recompute", "swap", "prefixes", "chunks", "drafts", "async"],
)
def test_answers_do_not_depend_on_the_schedule(
    plain: dict[str, dict[str, list[list[int]]]], options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"num_gpu_blocks": 256, "block_size": 16, "dtype": "bfloat16"} | options
    engine = LLMEngine(EngineArgs("smollm2", backend="native", **given))
    assert run(engine, LONG) == plain["greedy"]
    assert run(engine, FORKED) == plain["forked"]
    stats = engine.stats
    if "swap_space" in options:
        assert engine.scheduler.num_preemptions > 0
    if "speculative_config" in options:
        assert stats.num_draft_tokens > 0
    engine.shutdown()

"""Prompts with every sampling parameter on the native backend, against the torch backend.

Tokens and log-probabilities are the same to the last bit: both backends call the same kernels.

The torch backend has memory for all requests; the native one also has little, shares prefixes,
cuts prompts into chunks, drafts tokens, and runs ahead.
"""

from functools import cache
from typing import Any, Literal

import pytest

from pagedserve import LLM, RequestOutput, SamplingParams
from pagedserve.inputs import TokensPrompt
from pagedserve.sampling_params.options import PARAMETERS
from tests.support.examples import examples

# Each kind once; of 40 each twice, and the prompts of one begin alike.
NUM_PROMPTS = examples(20, all_of_them=160)
NUM_TOKENS = 12
BLOCK_SIZE = 8
SHARED_PREFIX = 24

pytestmark = pytest.mark.timeout(1200)


def favour_odd(_: list[int], logits: Any) -> Any:
    logits[1::2] += 1.5
    return logits


RANDOM: dict[str, Any] = {"temperature": 0.9, "top_k": 20}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2, "prediction": "the end of the day, and"},
    {"n": 4} | RANDOM,
    {"n": 2, "best_of": 3} | BEAMS,
    RANDOM | {"top_p": 0.9, "min_p": 0.05, "logprobs": 3},
    {"temperature": 0, "stop": ["the", ","], "min_tokens": 3} | PENALTIES,
    {"n": 3, "stop": ["or", "."], "include_stop_str_in_output": True} | RANDOM,
    {"n": 4, "length_penalty": 0.7, "early_stopping": True, "repetition_penalty": 1.1} | BEAMS,
    {"n": 2, "best_of": 4, "top_p": 0.8, "top_n_sigma": 2.5} | RANDOM | PENALTIES,
    {"logit_bias": {300: 3.0, 28: -5.0, 30: -1e30}} | RANDOM,
    {"allowed_token_ids": list(range(250, 3000, 7)), "logprobs": 1} | RANDOM,
    {"temperature": 0, "bad_words": [" the", " and", " or"]},
    {"temperature": 0, "prompt_logprobs": 2, "truncate_prompt_tokens": 8},
    {"structured_outputs": {"regex": r"[A-Z][a-z]+ [0-9]{2,4}\."}} | RANDOM,
    {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}, "temperature": 0},
    {"structured_outputs": {"choice": ["yes, it is", "no", "perhaps"]}, "temperature": 1.0},
    {"structured_outputs": {"grammar": 'root ::= ("a" | "bc")+ "!"'}, "n": 2} | RANDOM,
    {"logits_processors": [favour_odd]} | RANDOM,
    {"stop_token_ids": list(range(260, 400)), "detokenize": False} | RANDOM,
    {"skip_special_tokens": False, "ignore_eos": True, "temperature": 2.0, "top_p": 0.7},
    {"temperature": 1.0, "spaces_between_special_tokens": False},
)
MEMORIES: dict[str, dict[str, Any]] = {
    "ample": {"num_gpu_blocks": 2048},
    "recompute": {"num_gpu_blocks": 200, "preemption_mode": "recompute"},
    "swap": {"num_gpu_blocks": 120, "preemption_mode": "swap", "swap_space": 0.25},
    "prefixes": {"num_gpu_blocks": 2048, "enable_prefix_caching": True},
    "chunks": {
        "num_gpu_blocks": 1024,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 64,
    },
    "drafts": {
        "num_gpu_blocks": 1024,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    },
    "async": {"num_gpu_blocks": 1024, "async_scheduling": True},
}


def params_of(number: int) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": NUM_TOKENS - number % 4} | KINDS[number % len(KINDS)]
    if given.get("temperature") != 0:
        given["seed"] = 1000 + number
    return SamplingParams(**given)


def prompts_of(source: list[int]) -> list[TokensPrompt]:
    """Windows of 8 to 52 tokens, half of which begin alike."""
    prompts: list[TokensPrompt] = []
    for number in range(NUM_PROMPTS):
        start = 50 + number * 13 % (len(source) - 100)
        shared = source[:SHARED_PREFIX] if (number + number // len(KINDS)) % 2 else []
        prompts.append({"prompt_token_ids": shared + source[start : start + 8 + number * 7 % 21]})
    return prompts


class Asked:
    """Answers of the real model on both backends, each asked once."""

    def __init__(self, source: list[int]) -> None:
        self._prompts = prompts_of(source)
        self.of_torch = cache(self._of_torch)

    def run(self, backend: Literal["native", "torch"], **options: Any) -> list[RequestOutput]:
        llm = LLM("smollm2", backend=backend, block_size=BLOCK_SIZE, **options)
        outputs = llm.generate(
            self._prompts, [params_of(number) for number in range(NUM_PROMPTS)], use_tqdm=False
        )
        scheduler = llm.llm_engine.scheduler
        assert (scheduler.num_preemptions > 0) == ("preemption_mode" in options)
        assert (llm.llm_engine.stats.num_swapped_blocks > 0) == ("swap_space" in options)
        assert (scheduler.num_cached_tokens > 0) == ("enable_prefix_caching" in options)
        llm.shutdown()
        return outputs

    def _of_torch(self, dtype: str, quantization: str | None) -> list[RequestOutput]:
        return self.run("torch", dtype=dtype, quantization=quantization, num_gpu_blocks=2048)


@pytest.fixture(scope="module")
def asked(licence: list[int]) -> Asked:
    return Asked(licence)


def said_of(output: RequestOutput) -> list[tuple[object, ...]]:
    return [
        (list(found.token_ids), found.text, found.finish_reason, found.stop_reason)
        for found in output.outputs
    ]


def logprobs_of(output: RequestOutput) -> list[float]:
    """All log-probabilities that are returned, in order, and those of sequences."""
    entries = [entry for entry in output.prompt_logprobs or [] if entry is not None]
    sums = []
    for found in output.outputs:
        entries += found.logprobs or []
        sums += [found.cumulative_logprob] if found.cumulative_logprob is not None else []
    return [logprob.logprob for entry in entries for logprob in entry.values()] + sums


def check(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    different = [
        number
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        if said_of(ours) != said_of(theirs)
    ]
    assert not different, [
        (number, KINDS[number % len(KINDS)], said_of(found[number]), said_of(expected[number]))
        for number in different
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert logprobs_of(ours) == logprobs_of(theirs)


def test_every_parameter_is_given() -> None:
    given = {name for kind in KINDS for name in kind} | {"max_tokens", "seed"}
    # A budget needs tags, which the model lacks: tests/engine/test_thinking.py runs both backends.
    # Only the classes of an engine read extra_args (tests/server/test_plugins.py).
    assert PARAMETERS.keys() - given == {"extra_args", "output_kind", "thinking_token_budget"}


def test_answers_are_those_of_torch(asked: Asked) -> None:
    found = asked.run("native", dtype="float32", **MEMORIES["ample"])
    check(found, asked.of_torch("float32", None))


@pytest.mark.slow
@pytest.mark.parametrize("memory", list(MEMORIES)[1:])
def test_memory_changes_no_answer(asked: Asked, memory: str) -> None:
    found = asked.run("native", dtype="float32", **MEMORIES[memory])
    check(found, asked.of_torch("float32", None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8")]
)
def test_other_weights_give_the_same_answers(
    asked: Asked, dtype: str, quantization: str | None
) -> None:
    found = asked.run("native", dtype=dtype, quantization=quantization, **MEMORIES["ample"])
    check(found, asked.of_torch(dtype, quantization))

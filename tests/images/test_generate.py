"""Models that take images generate what transformers does, whatever becomes of their memory."""

from typing import Any

import pytest
from PIL import Image

from pagedserve import LLM, RequestOutput, SamplingParams
from tests.images.conftest import MakeFamily
from tests.support.drafts import NGRAM, Noise, drafting
from tests.support.images import FAMILIES, ImageOracle, picture

NUM_NEW = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
BEAMS = SamplingParams(
    use_beam_search=True, best_of=3, n=3, temperature=0, max_tokens=NUM_NEW, ignore_eos=True
)
SAMPLES = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=NUM_NEW, ignore_eos=True)

FEW: dict[str, Any] = {"block_size": 4, "num_gpu_blocks": 48}
MEMORIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks and prefixes": {
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 16,
        "block_size": 4,
    },
    "recompute": FEW | {"preemption_mode": "recompute", "enable_prefix_caching": True},
    "swap": FEW | {"preemption_mode": "swap", "swap_space": 0.01},
    "recompute in chunks": {
        "block_size": 4,
        "num_gpu_blocks": 32,
        "preemption_mode": "recompute",
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 16,
    },
}


def prompts_with(token: str) -> list[tuple[str, list[Image.Image]]]:
    """Texts and their images: of several shapes, none, two, and one twice."""
    return [
        (f"w1 {token} w3 w4", [picture(1)]),
        ("w5 w6 w7 w8 w9", []),
        (f"{token} w7 w8 {token} w9", [picture(2, 24, 40), picture(3)]),
        (f"w1 {token} w3 w4", [picture(4)]),
        (f"w2 w3 w4 w5 w6 w7 {token} w3 {token} w2", [picture(1)] * 2),
    ]


def given(text: str, images: list[Image.Image]) -> Any:
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else text


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


def run(llm: LLM, token: str) -> list[RequestOutput]:
    """Every prompt greedily, in a beam search, and as samples, all in one batch."""
    prompts = [given(*prompt) for prompt in prompts_with(token)]
    params = [way for way in (GREEDY, BEAMS, SAMPLES) for _ in prompts]
    return llm.generate(prompts * 3, params, use_tqdm=False)


def expected(oracle: ImageOracle) -> list[list[list[int]]]:
    """What transformers makes of every prompt, greedily and in a beam search."""
    return [
        oracle.generate(text, images, NUM_NEW, num_beams)
        for num_beams in (1, 3)
        for text, images in prompts_with(oracle.token)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_batches_are_those_of_transformers_in_any_memory(
    family: MakeFamily, name: str
) -> None:
    made = family(name)
    wanted = expected(made.oracle)
    assert wanted[0] != wanted[3], "the image decides"
    samples = None
    for memory, options in MEMORIES.items():
        llm = made.load(**options)
        outputs = run(llm, made.oracle.token)
        assert [tokens_of(output) for output in outputs[: len(wanted)]] == wanted, memory
        sampled = [tokens_of(output) for output in outputs[len(wanted) :]]
        samples = samples or sampled
        assert sampled == samples, memory
        num_preemptions = llm.llm_engine.scheduler.num_preemptions
        assert (num_preemptions > 0) == ("num_gpu_blocks" in options), memory
        assert llm.llm_engine.scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks


@pytest.mark.parametrize("name", FAMILIES)
def test_guesses_change_no_token(family: MakeFamily, name: str) -> None:
    made = family(name)
    wanted = run(made.load(), made.oracle.token)
    guessing = drafting(made.load(speculative_config=NGRAM), Noise({}, 0))
    found = run(guessing, made.oracle.token)
    assert list(map(tokens_of, found)) == list(map(tokens_of, wanted))
    assert guessing.llm_engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_a_request_alone_is_that_of_transformers(family: MakeFamily, name: str) -> None:
    made = family(name)
    llm = made.load()
    for text, images in prompts_with(made.oracle.token):
        (output,) = llm.generate(given(text, images), GREEDY, use_tqdm=False)
        assert tokens_of(output) == made.oracle.generate(text, images, NUM_NEW)


@pytest.mark.parametrize("options", [{"cpu_kernels": "generic"}, {"attention_backend": "torch"}])
def test_other_kernels_see_the_same(family: MakeFamily, options: dict[str, Any]) -> None:
    made = family("qwen2_5_vl")
    outputs = run(made.load(**options), made.oracle.token)
    wanted = expected(made.oracle)
    assert [tokens_of(output) for output in outputs[: len(wanted)]] == wanted


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_coarser_weights_take_images_too(
    family: MakeFamily, name: str, options: dict[str, Any]
) -> None:
    made = family(name)
    text, images = prompts_with(made.oracle.token)[0]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=0)
    found, exact = (
        made.load(**more).generate(given(text, images), params, use_tqdm=False)[0]
        for more in (options, {})
    )
    ((entry,), (wanted,)) = (output.outputs[0].logprobs or [{}] for output in (found, exact))
    assert entry.keys() == wanted.keys()
    for token, logprob in wanted.items():
        assert entry[token].logprob == pytest.approx(logprob.logprob, abs=0.5)


def test_token_ids_bring_images_too(family: MakeFamily) -> None:
    made = family("smolvlm")
    text, images = prompts_with(made.oracle.token)[2]
    llm = made.load()
    ids = llm.get_tokenizer()(text).input_ids
    prompt: Any = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert tokens_of(output) == made.oracle.generate(text, images, NUM_NEW)
    assert len(output.prompt_token_ids) > len(ids), "with all tokens of its images"


def test_launching_ahead_changes_nothing(family: MakeFamily) -> None:
    made = family("qwen2_vl")
    prompts = [given(*prompt) for prompt in prompts_with(made.oracle.token)]
    outputs = made.load(async_scheduling=True).generate(prompts, GREEDY, use_tqdm=False)
    assert [tokens_of(output) for output in outputs] == expected(made.oracle)[: len(prompts)]

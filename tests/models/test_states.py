"""Models whose layers keep states: what transformers generates, whatever becomes of the states.

A tiny model of each kind: delta rule with experts, short convolutions, attention and recurrence in
one layer, selective scans of the first kind, and no attention at all, of either kind.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedserve import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from pagedserve.errors import ConfigError, UnsupportedModelError
from pagedserve.models.states import PooledStates
from tests.support.tiny import VOCAB_SIZE
from tests.sweep.outcome import save_random

FAMILIES = ("qwen3_next", "lfm2", "falcon_h1", "jamba", "falcon_mamba", "mamba2")
NUM_NEW = 8
PROMPTS = [
    [(position * 31 + row) % (VOCAB_SIZE - 3) + 3 for position in range(length)]
    for row, length in enumerate((3, 33, 1, 20, 40, 17))
]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
BEAMS = SamplingParams(
    use_beam_search=True, best_of=3, n=3, temperature=0, max_tokens=NUM_NEW, ignore_eos=True
)
SAMPLES = SamplingParams(
    n=3, temperature=1.0, seed=5, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0
)
PARAMS = [GREEDY, BEAMS, SAMPLES]

# Of log-probabilities, as a share of the largest.
BOUND = 1e-5
FEW: dict[str, Any] = {"block_size": 4, "num_gpu_blocks": 44}
MEMORIES: dict[str, dict[str, Any]] = {
    "plain": {"num_gpu_blocks": 256},
    "chunks": {
        "num_gpu_blocks": 256,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 12,
    },
    "recompute": FEW | {"preemption_mode": "recompute"},
    "swap": FEW | {"preemption_mode": "swap", "swap_space": 0.01},
    "recompute in chunks": FEW
    | {
        "preemption_mode": "recompute",
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 16,
    },
}


class Oracle:
    """transformers' model."""

    def __init__(self, directory: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None  # as with ignore_eos

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_beams: int = 1) -> list[list[int]]:
        """New tokens of the best sequences."""
        made = self._model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
        )
        return [sequence[len(prompt) :].tolist() for sequence in made]

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Of new tokens, in one forward without a cache."""
        logits = self._model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        scores = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
        gathered: torch.Tensor = scores.gather(1, torch.tensor(tokens)[:, None])
        return gathered[:, 0]


class Family(NamedTuple):
    """A tiny model in a directory, and what transformers makes of it."""

    directory: Path
    oracle: Oracle

    def load(self, **options: Any) -> LLM:
        limits: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 24}
        limits |= {"generation_config": "vllm"}
        return LLM(model=str(self.directory), **(limits | options))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Callable[[str], Family]:
    folder = tmp_path_factory.mktemp("states")

    @cache
    def made(model_type: str) -> Family:
        directory = folder / model_type
        save_random(model_type, directory)
        return Family(directory, Oracle(directory))

    return made


def assert_exact(family: Family, prompt: list[int], output: RequestOutput) -> None:
    """Every sequence has the log-probabilities that transformers gives its tokens."""
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        exact = family.oracle.logprobs(prompt, tokens)
        if completion.logprobs is not None:
            entries = zip(tokens, completion.logprobs, strict=True)
            found = torch.tensor([entry[token].logprob for token, entry in entries])
            assert float((found - exact).abs().max() / exact.abs().max()) <= BOUND
        else:
            assert completion.cumulative_logprob == pytest.approx(float(exact.sum()), rel=BOUND)


def is_quick(model_type: str, memory: str) -> bool:
    return memory == "recompute in chunks" or (model_type == "qwen3_next" and memory != "plain")


@pytest.mark.parametrize(
    ("model_type", "memory"),
    [
        pytest.param(*way, marks=() if is_quick(*way) else pytest.mark.slow)
        for way in product(FAMILIES, MEMORIES)
    ],
)
def test_every_way_of_decoding_is_that_of_transformers(
    family: Callable[[str], Family], model_type: str, memory: str
) -> None:
    tiny = family(model_type)
    llm = tiny.load(**MEMORIES[memory])
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    outputs = llm.generate(
        prompt_token_ids=prompts, sampling_params=PARAMS * len(PROMPTS), use_tqdm=False
    )
    scheduler = llm.llm_engine.scheduler
    assert (scheduler.num_preemptions > 0) == ("preemption_mode" in MEMORIES[memory])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_exact(tiny, prompt, output)
    for prompt, greedy, beams in zip(PROMPTS, outputs[::3], outputs[1::3], strict=True):
        assert [list(answer.token_ids) for answer in greedy.outputs] == tiny.oracle.generate(prompt)
        found = [list(answer.token_ids) for answer in beams.outputs]
        assert found == tiny.oracle.generate(prompt, num_beams=3)
    assert scheduler.num_free_gpu_blocks == llm.llm_engine.memory.num_gpu_blocks


def test_who_comes_after_an_abort_finds_nothing_in_the_slot(
    family: Callable[[str], Family],
) -> None:
    tiny = family("qwen3_next")
    args = EngineArgs(model=str(tiny.directory), max_model_len=64, max_num_seqs=2)
    engine = LLMEngine(args)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
    ended: dict[int, RequestOutput] = {}
    for step in range(200):
        if step in (2, 4):
            engine.abort_request(str(step // 2 - 1))
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason == "length":
                ended[int(output.request_id)] = output
    assert ended.keys() == {2, 3, 4, 5}
    for number, output in ended.items():
        assert_exact(tiny, PROMPTS[number], output)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_that_is_lost_is_found_at_load(
    family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str
) -> None:
    def lose(_: object, mixer: int, layer: Any, rows: Any) -> None:
        del mixer, layer, rows

    tiny = family("falcon_h1")
    monkeypatch.setenv("PAGEDSERVE_CACHE", str(tmp_path))  # where no earlier check is known
    monkeypatch.setattr(PooledStates, "store", lose)
    with pytest.raises(UnsupportedModelError, match="FalconH1ForCausalLM"):
        tiny.load(dtype=dtype)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_of_bfloat16_runs(family: Callable[[str], Family], model_type: str) -> None:
    tiny = family(model_type)
    (output,) = tiny.load(dtype="bfloat16").generate(
        prompt_token_ids=[PROMPTS[1]], sampling_params=GREEDY, use_tqdm=False
    )
    tokens = list(output.outputs[0].token_ids)
    exact = tiny.oracle.logprobs(PROMPTS[1], tokens)
    entries = zip(tokens, output.outputs[0].logprobs or [], strict=True)
    found = torch.tensor([entry[token].logprob for token, entry in entries])
    assert float((found - exact).abs().max() / exact.abs().max()) < 0.1


def test_states_that_leave_no_memory_are_refused_with_the_sum(
    family: Callable[[str], Family],
) -> None:
    with pytest.raises(ConfigError, match=r"for max_num_seqs, 24, .*lower max_num_seqs or raise"):
        family("mamba2").load(kv_cache_memory=1 << 16)


def test_prefix_caching_is_refused_by_name(family: Callable[[str], Family]) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching is True, and layers"):
        family("lfm2").load(enable_prefix_caching=True)

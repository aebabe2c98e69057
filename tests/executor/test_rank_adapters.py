"""Adapters on several ranks, against the same requests in one process."""

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pagedserve import LLM, LoRARequest, SamplingParams, TokensPrompt
from pagedserve.errors import ExecutorDeadError
from tests.executor.test_rank_faults import ranks_of
from tests.executor.test_ranks import TIGHT, engine
from tests.support.families import save_family
from tests.support.lora import save_random_adapter

# Each with matrices of other modules; together they shard both sides of each.
CHOSEN = ("all-linear", "embeddings and head", "patterns")
# Fewer slots than adapters: they are loaded again and again.
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
CASES = [
    ("llama", 2, "fused"),
    pytest.param("llama, tied, odd vocabulary", 2, "modules", marks=pytest.mark.slow),
    pytest.param("llama, tied, odd vocabulary", 3, "generic", marks=pytest.mark.slow),
    pytest.param("llama, one KV head", 3, "fused", marks=pytest.mark.slow),
    pytest.param("gemma2", 2, "generic", marks=pytest.mark.slow),
    pytest.param("qwen3", 3, "modules", marks=pytest.mark.slow),
]


def saved_adapters(directory: Path, to: Path) -> list[LoRARequest | None]:
    base = AutoModelForCausalLM.from_pretrained(directory)
    paths = [
        save_random_adapter(base, kind, to / str(n), seed=n) for n, kind in enumerate(CHOSEN, 1)
    ]
    adapters = [LoRARequest(path.name, n, str(path)) for n, path in enumerate(paths, 1)]
    return [None, *adapters]


def answers(llm: LLM, adapters: list[LoRARequest | None]) -> list[tuple[list[int], list[float]]]:
    """Tokens of requests with each adapter, and the log-probability of each."""
    prompts = [
        TokensPrompt(prompt_token_ids=[3 + (7 * i + 13 * j) % 990 for j in range(9 + 5 * i)])
        for i in range(2 * len(adapters))
    ]
    outputs = llm.generate(prompts, GREEDY, lora_request=adapters * 2, use_tqdm=False)
    found = []
    for (completion,) in (output.outputs for output in outputs):
        tokens = list(completion.token_ids)
        entries = zip(tokens, completion.logprobs or (), strict=True)
        found.append((tokens, [entry[token].logprob for token, entry in entries if entry]))
    return found


# peft's, of adapters of a tied embedding, which may not be merged.
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(("family", "size", "kernels"), CASES)
def test_adapters_on_ranks_give_the_tokens_of_one_process(
    tmp_path: Path, family: str, size: int, kernels: str
) -> None:
    directory = save_family(tmp_path / "model", family)
    adapters = saved_adapters(directory, tmp_path)
    options = TIGHT | OPTIONS | {"cpu_kernels": kernels}
    wanted = answers(engine(directory, 1, **options), adapters)
    assert len({str(tokens) for tokens, _ in wanted}) == len(wanted)
    shared = engine(directory, size, **options)
    try:
        found = answers(shared, adapters)
        check_equal(found, wanted)
        if size == 2:
            kill_and_restart(shared)
            check_equal(answers(shared, adapters), wanted)
    finally:
        shared.llm_engine.shutdown()


def check_equal(found: Any, wanted: Any) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, logprobs), (_, expected) in zip(found, wanted, strict=True):
        assert logprobs == pytest.approx(expected, abs=1e-4)


def kill_and_restart(llm: LLM) -> None:
    """The slots of the new ranks are empty, though the scheduler thinks otherwise."""
    (rank,) = ranks_of(os.getpid())
    rank.kill()
    with pytest.raises(ExecutorDeadError):
        llm.generate({"prompt_token_ids": [3]}, GREEDY, use_tqdm=False)
    llm.llm_engine.restart()

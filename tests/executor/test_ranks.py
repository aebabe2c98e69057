"""Models that several processes share, against the same model in one process."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any, Self

import pytest

from pagedserve import LLM, BeamSearchParams, RequestOutput, SamplingParams, TokensPrompt
from pagedserve.models.load import read
from tests.support.families import FAMILIES, save_family
from tests.support.tiny import VOCAB_SIZE, save_llama_weights, save_tokenizer

# Memory so short that requests are swapped, prompts in pieces, and prefixes that others have.
TIGHT: dict[str, Any] = {
    "num_gpu_blocks": 20,
    "max_num_batched_tokens": 40,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "preemption_mode": "swap",
    "swap_space": 0.01,
}
ROOMY: dict[str, Any] = {"num_gpu_blocks": 256}


def engine(directory: Path, size: int, **options: Any) -> LLM:
    return LLM(
        str(directory),
        tensor_parallel_size=size,
        max_model_len=256,
        max_num_seqs=8,
        use_tqdm_on_load=False,
        **options,
    )


def answers(llm: LLM, num_tokens: int = 990) -> list[RequestOutput]:
    """Greedy, drawn, forked and scored requests, some of which begin alike."""
    lengths = range(20, 62, 7)
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [3 + (7 * i * (i % 3) + 13 * j) % num_tokens for j in range(length)]}
        for i, length in enumerate(lengths)
    ]
    kinds = [
        SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=24),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    ]
    params = [kind for kind, _ in zip(itertools.cycle(kinds), prompts, strict=False)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    for prompt, found in zip(prompts, llm.beam_search(prompts[:1], beams), strict=False):
        assert len(found.sequences) == beams.beam_width, prompt
        outputs.append(found.sequences)  # type: ignore[arg-type]
    return outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [
        list(sequence.tokens if hasattr(sequence, "tokens") else sequence.token_ids)
        for output in outputs
        for sequence in (output if isinstance(output, list) else output.outputs)
    ]


def logprobs_of(outputs: list[Any]) -> list[float]:
    [scored, *_] = outputs
    positions = [*scored.outputs[0].logprobs, *scored.prompt_logprobs[1:]]
    return [entry.logprob for position in positions for entry in position.values()]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_family(tmp_path_factory.mktemp("family"), name) for name in FAMILIES}


# Of every kind of exchange one, and every family in the slow tests.
QUICK = {
    ("llama, one KV head", 2, "generic"),
    ("gemma2", 3, "fused"),
    ("qwen3_moe", 2, "modules"),
}
GRID = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in itertools.product(FAMILIES, (2, 3), ("fused", "modules", "generic"))
]


# Ranks keep tied embeddings as they are, as Gemma 2 has, and one process quantizes them.
INT8 = [
    ("llama", 2, "fused"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(("llama", "qwen3"), (2, 3), ("fused", "modules"))
        if case != ("llama", 2, "fused")
    ),
]


@pytest.mark.parametrize(("name", "size", "kernels"), INT8)
def test_int8_weights_of_ranks_are_those_of_one_process(
    directories: dict[str, Path], name: str, size: int, kernels: str
) -> None:
    """Shards are quantized as the whole layers, so log-probabilities differ by sums alone."""
    options = {**TIGHT, "cpu_kernels": kernels, "quantization": "int8"}
    wanted = answers(engine(directories[name], 1, **options))
    shared = engine(directories[name], size, **options)
    try:
        found = answers(shared)
    finally:
        shared.llm_engine.shutdown()
    assert tokens_of(found) == tokens_of(wanted)
    assert logprobs_of(found) == pytest.approx(logprobs_of(wanted), abs=1e-4)


@pytest.mark.parametrize(("name", "size", "kernels"), GRID)
def test_ranks_give_the_tokens_of_one_process(
    directories: dict[str, Path], name: str, size: int, kernels: str
) -> None:
    options = {**TIGHT, "cpu_kernels": kernels}
    alone = engine(directories[name], 1, **options)
    wanted = answers(alone)
    shared = engine(directories[name], size, **options)
    try:
        found = answers(shared)
        assert shared.llm_engine.scheduler.num_preemptions > 0
    finally:
        shared.llm_engine.shutdown()
    assert tokens_of(found) == tokens_of(wanted)
    assert logprobs_of(found) == pytest.approx(logprobs_of(wanted), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_draft_tokens_change_no_token_on_ranks(directories: dict[str, Path], size: int) -> None:
    wanted = answers(engine(directories["llama"], 1, **TIGHT))
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    shared = engine(directories["llama"], size, **TIGHT, speculative_config=drafts)
    try:
        found = answers(shared)
        assert shared.llm_engine.stats.num_draft_tokens > 0
    finally:
        shared.llm_engine.shutdown()
    assert tokens_of(found) == tokens_of(wanted)


class Reads:
    """A file of tensors, or one tensor of it, which counts the names that are read."""

    def __init__(self, inner: Any, names: Counter[str], name: str = "") -> None:
        self._inner, self._names, self._name = inner, names, name

    def get_slice(self, name: str) -> "Reads":
        return Reads(self._inner.get_slice(name), self._names, name)

    def __getitem__(self, part: Any) -> Any:
        self._names[self._name] += 1
        return self._inner[part]

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_the_check_of_shards_reads_the_first_layers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama_weights(tmp_path, num_hidden_layers=5, vocab_size=VOCAB_SIZE)
    save_tokenizer(tmp_path)
    names: Counter[str] = Counter()
    opened: Any = vars(read)["safe_open"]
    monkeypatch.setattr(read, "safe_open", lambda *a, **k: Reads(opened(*a, **k), names))
    engine(tmp_path, 2, **ROOMY).llm_engine.shutdown()
    times = {
        layer: {names[name] for name in names if f"layers.{layer}." in name} for layer in range(5)
    }
    # Rank 0 reads its shards, and the first layer whole.
    assert times == {0: {2}, **{layer: {1} for layer in range(1, 5)}}

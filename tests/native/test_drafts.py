"""Draft models on the native backend: the tokens without drafts, and those of the torch backend."""

from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM, LLMEngine, RequestOutput, SamplingParams
from pagedserve.errors import ConfigError
from tests.support.decoders import save_decoder
from tests.support.drafts import drafting
from tests.support.tiny import save_tiny_llama

PROMPTS = [[1, 5, 9], [4, 8, 15, 16], [23], [*range(30, 60)]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=12, seed=5, n=2, max_tokens=12, ignore_eos=True),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: save_decoder(directory / name, name) for name in ("llama", "qwen3")}


def answers(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(PROMPTS, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


def with_drafts(model: Path, draft: Path, kv_cache_memory: int = 1 << 22, **options: Any) -> LLM:
    config = {"model": str(draft), "num_speculative_tokens": 3, "kv_cache_memory": kv_cache_memory}
    given: dict[str, Any] = {"backend": "native", "num_gpu_blocks": 64} | options
    return drafting(LLM(str(model), speculative_config=config, **given))


@pytest.mark.parametrize("draft", ["llama", "qwen3"])
def test_tokens_are_those_without_drafts(models: dict[str, Path], draft: str) -> None:
    model = models["llama"]
    drafted = with_drafts(model, models[draft], enable_prefix_caching=True)
    backends: list[Any] = ["native", "torch"]
    plain = [LLM(str(model), backend=backend, num_gpu_blocks=64) for backend in backends]
    for params in PARAMS:
        found, *expected = (tokens(answers(llm, params)) for llm in (drafted, *plain))
        assert expected == [found, found]
    assert drafted.llm_engine.stats.num_draft_tokens > 0


def test_the_same_model_is_always_right(models: dict[str, Path]) -> None:
    llm = with_drafts(models["qwen3"], models["qwen3"])
    for output in answers(llm, PARAMS[0]):
        assert output.metrics is not None
        counts = output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens
        assert counts == (12, 12)


def test_sequences_beyond_the_memory_of_the_draft_model_have_no_drafts(
    models: dict[str, Path],
) -> None:
    model, prompts = models["llama"], [[4, 8, 15, 16], [*range(3, 90)], [23]]
    plain = LLM(str(model), backend="native", num_gpu_blocks=64)
    drafted = with_drafts(model, model, kv_cache_memory=4 * 16 * 768)  # 64 tokens
    expected, found = (llm.generate(prompts, PARAMS[0], use_tqdm=False) for llm in (plain, drafted))
    assert tokens(found) == tokens(expected)
    assert [output.metrics.num_draft_tokens for output in found] == [12, 0, 12]


def test_drafts_go_on_after_a_step_of_their_model_failed(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = with_drafts(models["llama"], models["llama"])
    expected, failures = answers(drafted, PARAMS[0]), iter([MemoryError("once")])
    step = LLMEngine.step

    def failing(engine: LLMEngine) -> list[RequestOutput]:
        if engine is not drafted.llm_engine and (error := next(failures, None)) is not None:
            raise error
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", failing)
    with pytest.raises(MemoryError, match="once"):
        answers(drafted, PARAMS[0])
    assert tokens(answers(drafted, PARAMS[0])) == tokens(expected)


def test_another_vocabulary_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    draft = save_tiny_llama(tmp_path)
    file = draft / "tokenizer.json"
    file.write_text(file.read_text().replace('" w96"', '" x96"'))
    with pytest.raises(ConfigError, match="whose tokens are not those of"):
        with_drafts(models["llama"], draft)

"""Models with images on two ranks give what transformers gives of each prompt alone."""

from typing import Any

import pytest

from tests.images.conftest import MakeFamily
from tests.images.test_life import CHUNKS, GREEDY, answers, prompt_of, tokens_of


def failing(**_: object) -> None:
    raise ValueError("nothing to see")


@pytest.mark.parametrize(
    "name",
    [
        "qwen2_vl",  # positions in three dimensions
        pytest.param("llava", marks=pytest.mark.slow),
        pytest.param("smolvlm", marks=pytest.mark.slow),
    ],
)
def test_images_are_answered_as_by_one_process(
    family: MakeFamily, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = family(name)
    llm = made.load(tensor_parallel_size=2, **CHUNKS)
    try:
        model: Any = llm.llm_engine.model_executor.worker.loaded.model  # type: ignore[attr-defined]
        prompts = ["w5 w6 w7", prompt_of(made, 1), prompt_of(made, 1, 2), prompt_of(made, 2)]
        found = [tokens_of(output) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        expected = [made.oracle.generate("w5 w6 w7", [], 6)[0]]
        expected += [answers(made, 1), answers(made, 1, 2), answers(made, 2)]
        assert found == expected
        with monkeypatch.context() as patch:
            patch.setattr(model, "get_image_features", failing)
            failed, text = llm.generate([prompt_of(made, 3), "w5 w6 w7"], GREEDY, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        (again,) = llm.generate(prompt_of(made, 3), GREEDY, use_tqdm=False)
        assert [tokens_of(text), tokens_of(again)] == [expected[0], answers(made, 3)]
    finally:
        llm.llm_engine.shutdown()

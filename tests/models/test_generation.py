"""What a generation config says of a model, by the names of ours."""

import pytest
from transformers import GenerationConfig, LlamaConfig

from pagedserve.models.generation import eos_token_ids, recommended_sampling


def test_what_the_makers_recommend_comes_by_our_names() -> None:
    config = GenerationConfig(temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=7)
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 7}
    assert recommended_sampling(config) == expected


def test_defaults_of_transformers_are_no_recommendation() -> None:
    assert recommended_sampling(GenerationConfig()) == {}
    assert recommended_sampling(None) == {}


@pytest.mark.parametrize(("ids", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, (2,))])
def test_the_generation_config_names_the_end_before_the_model_config(
    ids: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    config = LlamaConfig(eos_token_id=2)
    assert eos_token_ids(GenerationConfig(eos_token_id=ids), config) == expected

"""Sampling parameters that are changed, copied, and handed to an engine."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pagedserve import BeamSearchParams, RequestError, SamplingParams
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams


def processor(token_ids: list[int], logits: Any) -> Any:
    return logits


def test_what_was_assigned_must_go_together_when_it_is_used() -> None:
    params = SamplingParams()
    params.temperature = 0
    params.n = 3
    with pytest.raises(RequestError, match="n is 3 with greedy sampling"):
        params.resolved(max_model_len=10, vocab_size=7)
    with pytest.raises(RequestError, match="unknown sampling parameter: tempature=1"):
        params.tempature = 1


def test_an_engine_says_what_as_many_as_there_are_means() -> None:
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1, truncate_prompt_tokens=-1)
    own = params.resolved(max_model_len=10, vocab_size=7)
    assert (own.logprobs, own.prompt_logprobs, own.truncate_prompt_tokens) == (7, 7, 9)
    assert (params.logprobs, params.prompt_logprobs, params.truncate_prompt_tokens) == (-1, -1, -1)
    plain = SamplingParams(logprobs=2, max_tokens=None)
    assert plain.resolved(max_model_len=10, vocab_size=7) == plain


def test_minus_one_is_no_seed_and_no_budget() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(thinking_token_budget=-1) == SamplingParams()


def test_a_clone_goes_its_own_way() -> None:
    params = SamplingParams(n=2, stop=["a"], logit_bias={3: 1.0}, max_tokens=20)
    clone = params.clone()
    assert clone == params
    clone.max_tokens = 21
    assert params.max_tokens == 20


def test_the_order_is_vllms() -> None:
    # n, best_of, presence, frequency and repetition penalty, temperature, top_p, top_k, min_p, seed
    params = SamplingParams(1, None, 0.1, 0.2, 1.5, 0.7, 0.9, 5, 0.05, 3)
    named = SamplingParams(
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.5,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.05,
        seed=3,
    )
    assert params == named


def test_from_optional_leaves_none_at_the_default() -> None:
    given: dict[str, Any] = dict.fromkeys(SamplingParams.__dataclass_fields__)
    assert SamplingParams.from_optional(**given) == SamplingParams(max_tokens=None)
    assert SamplingParams.from_optional(n=2, logit_bias={"5": 1}) == SamplingParams(
        n=2, logit_bias={5: 1}
    )


def test_a_processor_with_three_arguments_gets_the_prompt() -> None:
    calls = []

    def with_prompt(prompt: list[int], token_ids: list[int], logits: Any) -> Any:
        calls.append((prompt, token_ids, logits))
        return logits

    params = SamplingParams(logits_processors=[processor, with_prompt])
    bound = params.with_prompt((5, 6))
    assert bound.logits_processors[0] is processor
    assert bound.logits_processors[1]([7], "logits") == "logits"  # type: ignore[arg-type]
    assert calls == [([5, 6], [7], "logits")]
    assert bound.logits_processors[1].__name__ == "with_prompt"
    plain = SamplingParams(logits_processors=[processor])
    assert plain.with_prompt((5, 6)) is plain


def test_arguments_with_a_value_are_not_the_prompt() -> None:
    def scaled(token_ids: list[int], logits: Any, scale: float = 2.0) -> Any:
        return token_ids, logits, scale

    def named(token_ids: list[int], logits: Any, *, scale: float) -> Any:
        return token_ids, logits, scale

    for given in (scaled, partial(named, scale=2.0), partial(scaled, scale=2.0)):
        bound = SamplingParams(logits_processors=[given]).with_prompt((5, 6))
        assert bound.logits_processors[0]([7], "logits") == ([7], "logits", 2.0)  # type: ignore[arg-type]


def test_a_constraint_under_two_names_must_be_the_same() -> None:
    given: dict[str, Any] = {"structured_outputs": {"choice": ["a"]}}
    same, unset, other = (
        given | {"guided_decoding": value} for value in ({"choice": ["a"]}, None, {"choice": ["b"]})
    )
    assert SamplingParams(**same) == SamplingParams(**given) == SamplingParams(**unset)
    with pytest.raises(RequestError, match="are the same option, and differ"):
        SamplingParams(**other)


def test_a_constraint_can_be_read_and_assigned_under_its_former_name() -> None:
    first, second = (StructuredOutputsParams(choice=[text]) for text in "ab")
    given: dict[str, Any] = {"guided_decoding": first}
    params = SamplingParams(**given)
    assert params.guided_decoding == params.structured_outputs == first
    assert replace(params, structured_outputs=second).guided_decoding == second
    params.guided_decoding = {"choice": ["b"]}
    assert params.structured_outputs == second
    params.guided_decoding = None
    assert params == SamplingParams()


def test_a_constraint_is_made_of_optional_arguments() -> None:
    off: dict[str, Any] = {"json": None, "regex": None, "backend": "outlines"}
    assert StructuredOutputsParams.from_optional(**off) is None
    made = StructuredOutputsParams.from_optional(**off, choice=["a"], whitespace_pattern=None)
    assert made == StructuredOutputsParams(choice=["a"])


def test_options_of_a_constraint_that_are_off_say_nothing() -> None:
    given = StructuredOutputsParams(choice=["a"], structural_tag=None)
    assert given == StructuredOutputsParams(choice=["a"])
    with pytest.raises(RequestError, match="has structural_tag; it is not supported here"):
        StructuredOutputsParams(choice=["a"], structural_tag="{}")


def test_options_of_a_backend_have_no_effect() -> None:
    given = StructuredOutputsParams(choice=["a"], backend="xgrammar", disable_fallback=True)
    assert given == StructuredOutputsParams(choice=["a"])


def test_beam_search_params_are_a_search_without_an_early_end() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5).sampling_params()
    assert (params.n, params.max_tokens, params.length_penalty) == (3, 5, 0.5)
    assert (params.use_beam_search, params.early_stopping) == (True, "never")
    single = BeamSearchParams(1, 5).sampling_params()
    assert (single.use_beam_search, single.temperature, single.logprobs) == (False, 0, 0)
    for width in (1, 3):
        hot = BeamSearchParams(beam_width=width, max_tokens=5, temperature=0.5)
        with pytest.raises(RequestError, match=r"temperature is 0\.5; it must be 0"):
            hot.sampling_params()

from typing import Any

import numpy as np
import pytest

from pagedserve.errors import RequestError
from pagedserve.inputs.prompts import (
    ParsedPrompt,
    TokenizedPrompt,
    match_params,
    parse_prompts,
    tokenize_prompt,
)
from pagedserve.sampling_params import SamplingParams

VOCAB_SIZE = 100


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def tokenize(prompt: ParsedPrompt) -> TokenizedPrompt:
    return tokenize_prompt(prompt, "prompt 3", encode=encode, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("prompts", "prompt_token_ids", "expected"),
    [
        ("a b", None, [("a b", None)]),
        (["a", "b"], None, [("a", None), ("b", None)]),
        (("a",), None, [("a", None)]),
        ({"prompt": "a"}, None, [("a", None)]),
        ({"prompt_token_ids": [1, 2]}, None, [(None, [1, 2])]),
        (["a", {"prompt_token_ids": [1]}], None, [("a", None), (None, [1])]),
        (None, [1, 2], [(None, [1, 2])]),
        (None, [[1], [2, 3]], [(None, [1]), (None, [2, 3])]),
        (None, np.array([[1, 2], [3, 4]]), [(None, [1, 2]), (None, [3, 4])]),
        (None, [np.array([1, 2])], [(None, [1, 2])]),
    ],
)
def test_all_forms_become_one(
    prompts: Any, prompt_token_ids: Any, expected: list[tuple[str | None, list[int] | None]]
) -> None:
    parsed = parse_prompts(prompts, prompt_token_ids)
    assert [(prompt.text, prompt.token_ids) for prompt in parsed] == expected


@pytest.mark.parametrize(
    ("prompts", "prompt_token_ids", "message"),
    [
        (None, None, "no prompts: give prompts or prompt_token_ids"),
        ([], None, "no prompts: the list is empty"),
        (None, [], "no prompts: prompt_token_ids is empty"),
        ("a", [1], "both given; give one of them"),
        ([1, "a"], None, "prompt 0 is 1; it must be a string, a list of token ids"),
        (["a", None], None, "prompt 1 is None; it must be a string, a list"),
        ([{"token_ids": [1]}], None, "prompt 0 has the key 'token_ids'; accepted are prompt, pro"),
        ([{"prompt": None}], None, "prompt 0 is"),
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            None,
            "multi_modal_data of the prompt has a int; it must be",
        ),
        (
            {"prompt": "a", "prompt_embeds": 1},
            None,
            "the prompt has prompt_embeds, which is not supported: prompts are text, token ids and",
        ),
        (
            {"prompt": "a", "mm_processor_kwargs": {"do_resize": False}},
            None,
            "the prompt has mm_processor_kwargs, which is not supported",
        ),
        ({"prompt": "a", "cache_salt": 5}, None, "cache_salt of the prompt is 5; it must be a str"),
        ({"prompt": "a", "cache_salt": ""}, None, "cache_salt of the prompt is ''"),
        ([{"prompt": 3}], None, "prompt 0 is"),
        (7, None, "prompts is 7; it must be a string, a list"),
        (None, "abc", "prompt_token_ids is 'abc'; it must be a list"),
        (None, [[1], "b"], "the token ids of prompt 1 are 'b'"),
        ({"prompt_token_ids": "abc"}, None, "the token ids of the prompt are 'abc'"),
    ],
)
def test_other_forms_are_refused(prompts: Any, prompt_token_ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_prompts(prompts, prompt_token_ids)


@pytest.mark.parametrize("given", [{}, {"fps": [2.0], "do_sample_frames": False}, {"size": None}])
def test_options_of_videos_have_no_effect(given: dict[str, Any]) -> None:
    prompt: Any = {"prompt": "a", "mm_processor_kwargs": given}
    assert parse_prompts(prompt) == parse_prompts("a")


def test_text_is_encoded() -> None:
    prompt = tokenize(ParsedPrompt("a bb ccc", None))
    assert (prompt.text, prompt.token_ids) == ("a bb ccc", [1, 2, 3])


def test_integers_of_other_libraries_become_ints() -> None:
    prompt = tokenize(ParsedPrompt(None, [np.int64(1), 2]))
    assert [type(token) for token in prompt.token_ids] == [int, int]


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "prompt 3 is empty; it must have at least one token"),
        ([1, 2.0], r"token 1 of prompt 3 is 2\.0; token ids must be integers"),
        ([1, "2"], "token 1 of prompt 3 is '2'; token ids must be integers"),
        ([True], "token 0 of prompt 3 is True; token ids must be integers"),
        ([5, -1], "token 1 of prompt 3 is -1; token ids must be from 0 to 99"),
        ([100], "token 0 of prompt 3 is 100; token ids must be from 0 to 99"),
        ([2**40], "token ids must be from 0 to 99"),
    ],
)
def test_bad_token_ids_are_named(token_ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenize(ParsedPrompt(None, token_ids))


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt 3 is empty"):
        tokenize(ParsedPrompt("", None))


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt 3 is no valid Unicode text"):
        tokenize(ParsedPrompt("a \ud800 b", None))


def test_a_list_of_integers_is_one_prompt() -> None:
    (prompt,) = parse_prompts([1, 2])
    assert (prompt.text, list(prompt.token_ids or ())) == (None, [1, 2])
    both = parse_prompts([[1, 2], np.array([3])])
    assert [tokenize(prompt).token_ids for prompt in both] == [[1, 2], [3]]


def test_ids_win_and_their_text_is_kept() -> None:
    (prompt,) = parse_prompts({"prompt": "shown", "prompt_token_ids": [1, 2]})
    assert (tokenize(prompt).text, tokenize(prompt).token_ids) == ("shown", [1, 2])
    assert parse_prompts({"prompt": "a", "multi_modal_data": None}) == parse_prompts("a")


def test_equal_salts_are_one_salt_and_others_another() -> None:
    prompts = [{"prompt": "a", "cache_salt": salt} for salt in ("x", "x", "y")]
    (first, same, other), (plain,) = parse_prompts(prompts), parse_prompts("a")
    assert tokenize(first).salt == tokenize(same).salt == first.salt
    assert len({first.salt, other.salt, plain.salt}) == 3
    assert plain.salt == 0
    assert max(first.salt, other.salt) < 1 << 63  # above are prompts that share with nobody


def test_params_are_one_for_all_or_one_each() -> None:
    params, other = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert match_params(None, 2) == [SamplingParams()] * 2
    assert match_params(params, 2) == [params, params]
    assert match_params([params, other], 2) == [params, other]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([SamplingParams()], "1 sampling_params for 2 prompts"),
        ([], "0 sampling_params for 2 prompts"),
        ({"temperature": 0}, "sampling_params is"),
        ([SamplingParams(), None], "sampling_params is"),
    ],
)
def test_params_that_do_not_match_are_refused(params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        match_params(params, 2)

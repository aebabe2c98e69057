"""Log-probabilities in OpenAI's formats, from the entries of an engine."""

import pytest

from pagedserve.output.detokenizer import Detokenizer
from pagedserve.outputs import Logprob
from pagedserve.server.logprobs import TokenNames, chat_logprobs, completion_logprobs
from tests.support.formula import byte_tokenizer

TOKENIZER = byte_tokenizer()
NAMES = TokenNames(Detokenizer(TOKENIZER), as_ids=False)
# Two bytes that are no characters alone, so that their names are one.
FIRST, SECOND = TOKENIZER("é", add_special_tokens=False).input_ids


@pytest.mark.parametrize("chosen", [FIRST, SECOND])
def test_of_tokens_with_one_name_the_most_likely_counts(chosen: int) -> None:
    """lm-eval calls a token greedy if no value is larger."""
    values = {FIRST: -0.2, SECOND: -9.0}
    entry = {
        token: Logprob(value, rank, None) for rank, (token, value) in enumerate(values.items())
    }
    found = completion_logprobs(NAMES, 2, [chosen], [entry])
    assert found["token_logprobs"] == [values[chosen]]
    assert found["top_logprobs"] == [{"\ufffd": values[FIRST]}]


def test_of_others_with_one_name_the_most_likely_counts() -> None:
    (chosen,) = TOKENIZER("a", add_special_tokens=False).input_ids
    entry = {
        chosen: Logprob(-11.0, 3, None),
        FIRST: Logprob(-0.2, 1, None),
        SECOND: Logprob(-9.0, 2, None),
    }
    found = completion_logprobs(NAMES, 2, [chosen], [entry])
    assert found["top_logprobs"] == [{"a": -11.0, "\ufffd": -0.2}]
    assert list(found["top_logprobs"][0]) == ["a", "\ufffd"]


def test_a_chosen_token_that_ties_with_the_last_adds_none_to_the_top_of_a_chat() -> None:
    smaller, larger = sorted((FIRST, SECOND))
    entry = {larger: Logprob(-0.5, 1, None), smaller: Logprob(-0.5, 1, None)}
    (content,) = chat_logprobs(NAMES, 1, [larger], [entry])["content"]
    assert content["logprob"] == -0.5
    assert [top["bytes"] for top in content["top_logprobs"]] == [NAMES.bytes_of(smaller)]


def test_the_top_of_a_chat_has_the_most_likely_tokens_first() -> None:
    entry = {SECOND: Logprob(-2.0, 2, None), FIRST: Logprob(-0.2, 1, None)}
    for num_top, wanted in (0, []), (1, [-0.2]), (2, [-0.2, -2.0]), (-1, [-0.2, -2.0]):
        (content,) = chat_logprobs(NAMES, num_top, [SECOND], [entry])["content"]
        assert [top["logprob"] for top in content["top_logprobs"]] == wanted

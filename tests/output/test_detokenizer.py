import time
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from pagedserve.output.detokenizer import Detokenizer, TextStream

# The fixtures are read-only, so one serves all examples.
PROPERTY = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
REPLACEMENT = "\ufffd"


def whole(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def pieces_of(stream: TextStream, token_ids: Sequence[int], *, at_once: int = 1) -> list[str]:
    """What comes out when the sequence grows by ``at_once`` tokens, and the rest."""
    ends = [*range(at_once, len(token_ids), at_once), len(token_ids)]
    return [*(stream.advance(token_ids[:end]) for end in ends), stream.rest()]


def token_ids_of(tokenizer: PreTrainedTokenizerBase) -> st.SearchStrategy[list[int]]:
    """Any ids, a few past the vocabulary too: models pad theirs."""
    return st.lists(st.integers(0, len(tokenizer) + 3), max_size=40)


@PROPERTY
@given(data=st.data())
def test_pieces_of_random_ids_join_to_the_whole(
    toy_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    token_ids = data.draw(token_ids_of(toy_tokenizer))
    at_once = data.draw(st.integers(1, 4))
    stream = Detokenizer(toy_tokenizer).stream()
    pieces = pieces_of(stream, token_ids, at_once=at_once)
    assert "".join(pieces) == whole(toy_tokenizer, token_ids)
    assert stream.text + stream.rest() == "".join(pieces)


@PROPERTY
@given(text=st.text(max_size=60))
def test_pieces_of_random_text_join_to_the_whole_and_none_is_half_a_character(
    real_tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    token_ids = real_tokenizer(text, add_special_tokens=False).input_ids
    pieces = pieces_of(Detokenizer(real_tokenizer).stream(), token_ids)
    expected = whole(real_tokenizer, token_ids)  # not the text: the vocabulary lacks some bytes
    assert "".join(pieces) == expected
    if REPLACEMENT not in expected:
        assert not any(REPLACEMENT in piece for piece in pieces)


@PROPERTY
@given(data=st.data())
def test_pieces_of_the_real_vocabulary_join_to_the_whole(
    real_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    # The first few hundred hold the special tokens and the single bytes.
    some_id = st.one_of(st.integers(0, 300), st.integers(0, len(real_tokenizer) + 3))
    token_ids = data.draw(st.lists(some_id, max_size=40))
    pieces = pieces_of(Detokenizer(real_tokenizer).stream(), token_ids)
    assert "".join(pieces) == whole(real_tokenizer, token_ids)


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 ok", "日本語を話す", "naïve — café", "🏳️‍🌈", "ẞ𐍈"])
def test_a_character_comes_whole(real_tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    token_ids = real_tokenizer(text).input_ids
    pieces = pieces_of(Detokenizer(real_tokenizer).stream(), token_ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_word_comes_with_its_token(real_tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids = real_tokenizer("The capital of France is Paris").input_ids
    pieces = pieces_of(Detokenizer(real_tokenizer).stream(), token_ids)
    assert pieces == ["The", " capital", " of", " France", " is", " Paris", ""]


def test_an_incomplete_character_at_the_end_is_what_decode_says(
    real_tokenizer: PreTrainedTokenizerBase,
) -> None:
    token_ids = real_tokenizer("ok 𐍈").input_ids[:-1]
    stream = Detokenizer(real_tokenizer).stream()
    assert stream.advance(token_ids) == "ok "
    assert stream.rest() == REPLACEMENT
    assert whole(real_tokenizer, token_ids) == "ok " + REPLACEMENT


def test_special_tokens_have_no_text(real_tokenizer: PreTrainedTokenizerBase) -> None:
    eos = real_tokenizer.eos_token_id
    token_ids = [*real_tokenizer("Hello").input_ids, eos]
    assert Detokenizer(real_tokenizer).decode(token_ids) == "Hello"
    assert pieces_of(Detokenizer(real_tokenizer).stream(), token_ids) == ["Hello", "", ""]


def test_advancing_twice_gives_nothing_twice(toy_tokenizer: PreTrainedTokenizerBase) -> None:
    stream = Detokenizer(toy_tokenizer).stream()
    token_ids = [5, 9, 4]
    stream.advance(token_ids)
    text = stream.text
    assert stream.advance(token_ids) == ""
    assert stream.text == text


def test_bytes_that_never_complete_a_character_cost_no_more_than_others(
    real_tokenizer: PreTrainedTokenizerBase,
) -> None:
    lone_byte = real_tokenizer.get_vocab()["¨"]  # 0xA8
    stream = Detokenizer(real_tokenizer).stream()
    num_tokens = 4000
    grown: list[int] = []
    started = time.process_time()
    for _ in range(num_tokens):
        grown.append(lone_byte)
        stream.advance(grown)
    assert time.process_time() - started < 1
    assert stream.text + stream.rest() == REPLACEMENT * num_tokens

"""Bad words against a slow, obvious search, and as the real tokenizer writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from pagedserve import RequestError
from pagedserve.sampling.bad_words import BadWords

# Few tokens, so that outputs and sequences meet often.
tokens = st.integers(0, 2)
sequences = st.lists(st.lists(tokens, min_size=1, max_size=4).map(tuple), max_size=6, unique=True)


def characters(text: str) -> list[int]:
    return [ord(character) for character in text]


def ends_with(output: list[int], sequence: tuple[int, ...]) -> bool:
    return len(output) >= len(sequence) and tuple(output[-len(sequence) :]) == sequence


@given(sequences=sequences, output=st.lists(tokens, max_size=8))
def test_banned_is_every_token_after_which_the_output_ends_with_a_sequence(
    sequences: list[tuple[int, ...]], output: list[int]
) -> None:
    banned = BadWords(tuple(sequences)).banned_after(output)
    assert set(banned) == {
        token
        for token in range(3)
        if any(ends_with([*output, token], sequence) for sequence in sequences)
    }
    assert len(set(banned)) == len(banned)
    assert BadWords(tuple(sequences)).banned_after(tuple(output)) == banned


@given(sequences=sequences, wanted=st.lists(tokens, max_size=20))
def test_an_output_that_heeds_the_bans_holds_no_sequence(
    sequences: list[tuple[int, ...]], wanted: list[int]
) -> None:
    bad, output = BadWords(tuple(sequences)), list[int]()
    for token in wanted:
        if token not in bad.banned_after(output):
            output.append(token)
    assert not any(ends_with(output[:end], sequence) for sequence in sequences for end in range(21))


def test_a_word_is_encoded_with_and_without_a_space_before_it() -> None:
    bad = BadWords.from_words(["ab", "c"], characters, 128)
    expected = [characters(word) for word in ("ab", " ab", "c", " c")]
    assert bad.sequences == tuple(map(tuple, expected))


def test_equal_sequences_are_held_once() -> None:
    bad = BadWords.from_words(["a", "a", " a"], lambda text: characters(text.strip()), 128)
    assert bad.sequences == ((ord("a"),),)


def test_a_word_with_a_token_that_the_model_lacks_is_left_out() -> None:
    bad = BadWords.from_words(["ab", "c"], characters, ord("c"))
    assert bad.sequences == (tuple(characters("ab")), tuple(characters(" ab")))


def test_a_word_without_a_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"bad_words has '\\t', for which"):
        BadWords.from_words(["a", "\t"], lambda text: characters(text.strip()), 128)


def test_no_words_ban_nothing() -> None:
    assert BadWords.from_words([], characters, 128).banned_after([1, 2]) == ()


@pytest.mark.parametrize("word", ["Paris", "the", "serendipity", "日本語"])
@pytest.mark.parametrize("before", ["", "(", "I like", "I like the"])
@pytest.mark.parametrize("space", ["", " "])
def test_the_real_tokenizer_cannot_write_a_bad_word(
    real_tokenizer: PreTrainedTokenizerBase, word: str, before: str, space: str
) -> None:
    def encode(text: str) -> list[int]:
        token_ids: list[int] = real_tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    bad = BadWords.from_words([word], encode, len(real_tokenizer))
    begun, written = encode(before), encode(space + word)
    refused = [
        index
        for index, token in enumerate(written)
        if token in bad.banned_after(begun + written[:index])
    ]
    assert refused == [len(written) - 1]

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pagedserve.output.detokenizer import Detokenizer, TextStream
from tests.support.examples import examples

# The fixtures are read-only, so one serves all examples.
PROPERTY = settings(
    max_examples=examples(100, all_of_them=300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
REPLACEMENT = "\ufffd"


def whole(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    text = tokenizer.decode(
        list(token_ids),
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    assert isinstance(text, str)
    return text


def pieces_of(stream: TextStream, token_ids: Sequence[int], *, at_once: int = 1) -> list[str]:
    """What comes when the sequence grows by ``at_once`` tokens, and the rest."""
    pieces = []
    for end in [*range(at_once, len(token_ids), at_once), len(token_ids)]:
        grown = stream.advanced(token_ids[stream.num_tokens : end])
        assert grown.num_tokens == end
        assert grown.text.startswith(stream.text)
        pieces.append(grown.text[len(stream.text) :])
        stream = grown
    return [*pieces, stream.rest()]


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
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(toy_tokenizer, skip_special_tokens=skip)
    pieces = pieces_of(detokenizer.stream(), token_ids, at_once=at_once)
    expected = whole(toy_tokenizer, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == detokenizer.decode(token_ids) == expected


@PROPERTY
@given(data=st.data())
def test_the_text_of_tokens_at_once_is_that_of_each_alone(
    toy_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    token_ids = data.draw(token_ids_of(toy_tokenizer))
    at_once = alone = Detokenizer(toy_tokenizer).stream()
    at_once = at_once.advanced(token_ids)
    for token_id in token_ids:
        alone = alone.advanced([token_id])
    assert at_once.text == alone.text


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
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(real_tokenizer, skip_special_tokens=skip)
    pieces = pieces_of(detokenizer.stream(), token_ids)
    assert "".join(pieces) == whole(real_tokenizer, token_ids, skip_special_tokens=skip)


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
    stream = Detokenizer(real_tokenizer).stream().advanced(token_ids)
    assert stream.text == "ok "
    assert stream.rest() == REPLACEMENT
    assert whole(real_tokenizer, token_ids) == "ok " + REPLACEMENT


def test_special_tokens_have_no_text(real_tokenizer: PreTrainedTokenizerBase) -> None:
    eos = real_tokenizer.eos_token_id
    token_ids = [*real_tokenizer("Hello").input_ids, eos]
    assert Detokenizer(real_tokenizer).decode(token_ids) == "Hello"
    assert pieces_of(Detokenizer(real_tokenizer).stream(), token_ids) == ["Hello", "", ""]


def test_special_tokens_are_shown_where_they_are_not_skipped(
    real_tokenizer: PreTrainedTokenizerBase,
) -> None:
    first_byte, eos = real_tokenizer("𐍈").input_ids[0], real_tokenizer.eos_token_id
    detokenizer = Detokenizer(real_tokenizer, skip_special_tokens=False)
    pieces = pieces_of(detokenizer.stream(), [first_byte, eos])
    assert pieces == ["", REPLACEMENT + "<|im_end|>", ""]
    assert "".join(pieces) == detokenizer.decode([first_byte, eos])


def test_advancing_by_nothing_changes_nothing(toy_tokenizer: PreTrainedTokenizerBase) -> None:
    stream = Detokenizer(toy_tokenizer).stream().advanced([5, 9, 4])
    assert stream.advanced([]) == stream


@PROPERTY
@given(data=st.data())
def test_text_that_is_forgotten_changes_nothing_of_what_follows(
    toy_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    first, more = data.draw(token_ids_of(toy_tokenizer)), data.draw(token_ids_of(toy_tokenizer))
    stream = Detokenizer(toy_tokenizer).stream().advanced(first)
    num_chars = data.draw(st.integers(0, len(stream.text)))
    kept, cut = stream.advanced(more), stream.without(num_chars).advanced(more)
    assert cut.text == kept.text[num_chars:]
    assert cut.rest() == kept.rest()


@PROPERTY
@given(data=st.data())
def test_forks_share_what_they_had_and_go_their_own_ways(
    toy_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    shared, *ends = (data.draw(token_ids_of(toy_tokenizer)) for _ in range(3))
    parent = Detokenizer(toy_tokenizer).stream().advanced(shared)
    text = parent.text
    for end in ends:
        child = parent.advanced(end)
        assert child.text.startswith(text)
        assert child.text + child.rest() == whole(toy_tokenizer, shared + end)
    assert parent.text == text


@pytest.mark.parametrize(
    ("token", "text"), [("<|im_end|>",) * 2, ("Ġthe", " the"), ("¨", "\ufffd")]
)
def test_the_text_of_one_token_alone(
    real_tokenizer: PreTrainedTokenizerBase, token: str, text: str
) -> None:
    token_id = real_tokenizer.get_vocab()[token]
    assert Detokenizer(real_tokenizer).token_text(token_id) == text


def test_each_token_has_a_text_of_its_own(toy_tokenizer: PreTrainedTokenizerBase) -> None:
    detokenizer = Detokenizer(toy_tokenizer)
    token_ids = range(len(toy_tokenizer) + 3)
    expected = [
        whole(toy_tokenizer, [token_id], skip_special_tokens=False) for token_id in token_ids
    ]
    for _ in range(2):
        assert [detokenizer.token_text(token_id) for token_id in token_ids] == expected


def repeat(stream: TextStream, token_id: int, num_tokens: int) -> tuple[str, int]:
    """The text of one token over and over, and the most characters ever held back."""
    most = 0
    for _ in range(num_tokens):
        stream = stream.advanced([token_id])
        most = max(most, len(stream.rest()))
    return stream.text + stream.rest(), most


class CountingTokenizer:
    """A tokenizer that counts the ids it is asked about."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.num_ids = 0

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        return self._tokenizer.added_tokens_decoder

    @property
    def backend_tokenizer(self) -> Any:
        return self._tokenizer.backend_tokenizer

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        self.num_ids += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)

    def convert_ids_to_tokens(self, ids: list[int]) -> Any:
        self.num_ids += len(ids)
        return self._tokenizer.convert_ids_to_tokens(ids)


def test_bytes_that_never_complete_a_character_cost_no_more_than_others(
    real_tokenizer: PreTrainedTokenizerBase,
) -> None:
    lone_byte = real_tokenizer.get_vocab()["¨"]  # 0xA8
    counting = CountingTokenizer(real_tokenizer)
    text, most_held_back = repeat(Detokenizer(counting).stream(), lone_byte, 4000)
    assert text == REPLACEMENT * 4000
    assert most_held_back <= 3
    assert counting.num_ids <= 4000


def test_tokens_without_text_cost_no_more_than_others(
    toy_tokenizer: PreTrainedTokenizerBase,
) -> None:
    added = toy_tokenizer.added_tokens_decoder
    special = next(token_id for token_id, token in added.items() if token.special)
    counting = CountingTokenizer(toy_tokenizer)
    text, most_held_back = repeat(Detokenizer(counting).stream(), special, 4000)
    assert (text, most_held_back) == ("", 0)
    assert counting.num_ids <= 2 * 4000


def test_special_tokens_that_no_attribute_names_are_hidden_too() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}))
    words.add_special_tokens(["<|end|>", "<tool_call>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>")
    assert Detokenizer(tokenizer).hidden_tokens == {"<|end|>": 1, "<tool_call>": 2}
    assert Detokenizer(tokenizer).hides(["<think>", "\n<tool_call>"])
    assert not Detokenizer(tokenizer).hides(["<think>", "tool_call"])
    assert not Detokenizer(tokenizer, skip_special_tokens=False).hides(["<tool_call>"])


def test_a_panic_of_the_library_is_an_error_of_the_text() -> None:
    backend = Tokenizer(models.WordLevel({" ": 0, "a": 1}, unk_token="a"))
    backend.decoder = decoders.Strip(" ", 0, 2)
    detokenizer = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    with pytest.raises(RuntimeError, match="PanicException in a library"):
        detokenizer.stream().advanced([0])
    assert detokenizer.decode([1]) == "a"

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from pagedserve.output.detokenizer import Detokenizer, TextStream
from pagedserve.output.stop_strings import StopMatch, StopStrings

# The fixtures are read-only, so one serves all examples.
PROPERTY = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FEW = st.text("ab", max_size=12)
STOPS = st.builds(
    StopStrings,
    strings=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple),
    include=st.booleans(),
)
# What text is made of that tokens cut: joined emoji, combining marks, CJK, astral letters.
TEXT = st.one_of(
    st.text(max_size=30),
    st.lists(
        st.sampled_from([*"ab. ée日本語𐍈\u0301\u200d\ufe0f", "👩‍👩‍👧‍👦", "🏳️‍🌈"]), max_size=30
    ).map("".join),
)


def first_match(stops: StopStrings, text: str, num_old: int = 0) -> StopMatch | None:
    """What text that comes character by character says."""
    for end in range(num_old + 1, len(text) + 1):
        ending = [string for string in stops.strings if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return StopMatch(longest, end - len(longest), end)
    return None


def ended(stops: StopStrings, text: str) -> str:
    """The output that a whole text gives."""
    match = first_match(stops, text)
    return stops.cut(text, match) if match else text


def served(
    stream: TextStream, stops: StopStrings, token_ids: Sequence[int], *, at_once: int
) -> list[str]:
    """What is shown as the sequence grows by ``at_once`` tokens; the last is the final text."""
    shown: list[str] = []
    for end in range(at_once, len(token_ids) + at_once, at_once):
        num_old = len(stream.text)
        stream = stream.advanced(token_ids[:end])
        if match := stops.find(stream.text, num_old):
            return [*shown, stops.cut(stream.text, match)]
        shown.append(stops.visible(stream.text))
    text = stream.text + stream.rest()
    match = stops.find(text, len(stream.text))
    return [*shown, stops.cut(text, match) if match else text]


def check_serving(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], data: st.DataObject
) -> None:
    """With stop strings cut from the text itself, so that they overlap and match."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=data.draw(st.booleans()))
    text = detokenizer.decode(token_ids)
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 6))
    strings = {text[start : start + length] for start, length in data.draw(st.lists(spans))}
    stops = StopStrings(tuple(sorted(strings - {""})), include=data.draw(st.booleans()))
    shown = served(detokenizer.stream(), stops, token_ids, at_once=data.draw(st.integers(1, 4)))
    assert shown[-1] == ended(stops, text)
    for before, after in pairwise(shown):
        assert after.startswith(before)


@PROPERTY
@given(stops=STOPS, text=FEW, num_old=st.integers(0, 12))
def test_find_gives_the_match_that_comes_first_in_text_by_the_character(
    stops: StopStrings, text: str, num_old: int
) -> None:
    assert stops.find(text, num_old) == first_match(stops, text, num_old)


@PROPERTY
@given(stops=STOPS, text=FEW)
def test_held_is_the_longest_end_that_may_become_a_stop_string(
    stops: StopStrings, text: str
) -> None:
    begun = {string[:length] for string in stops.strings for length in range(len(string))}
    ends = [length for length in range(len(text) + 1) if text[len(text) - length :] in begun]
    assert stops.num_held(text) == (0 if stops.include else max(ends, default=0))


@PROPERTY
@given(stops=STOPS, pieces=st.lists(st.text("ab", max_size=4), max_size=6))
def test_what_is_shown_is_never_taken_back(stops: StopStrings, pieces: list[str]) -> None:
    final, text, shown = ended(stops, "".join(pieces)), "", ""
    for piece in pieces:
        num_old, text = len(text), text + piece
        if match := stops.find(text, num_old):
            assert stops.cut(text, match) == final
            return
        assert stops.visible(text).startswith(shown)
        shown = stops.visible(text)
        assert final.startswith(shown)
    assert final == text


@PROPERTY
@given(data=st.data())
def test_random_tokens_are_served_up_to_their_first_stop(
    toy_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    some_id = st.integers(0, len(toy_tokenizer) + 3)
    check_serving(toy_tokenizer, data.draw(st.lists(some_id, max_size=30)), data)


@PROPERTY
@given(data=st.data())
def test_random_text_is_served_up_to_its_first_stop(
    toy_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    check_serving(toy_tokenizer, toy_tokenizer(data.draw(TEXT)).input_ids, data)


@PROPERTY
@given(data=st.data())
def test_tokens_of_the_real_vocabulary_are_served_up_to_their_first_stop(
    real_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    # The first few hundred hold the special tokens and the single bytes.
    some_id = st.one_of(st.integers(0, 300), st.integers(0, len(real_tokenizer) + 3))
    encoded = TEXT.map(lambda text: real_tokenizer(text).input_ids)
    token_ids = data.draw(st.one_of(encoded, st.lists(some_id, max_size=30)))
    check_serving(real_tokenizer, token_ids, data)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_within_a_token_cuts_it(
    real_tokenizer: PreTrainedTokenizerBase, include: bool
) -> None:
    stops = StopStrings(("of Fr", "France"), include)
    token_ids = real_tokenizer("The capital of France is Paris").input_ids
    shown = served(Detokenizer(real_tokenizer).stream(), stops, token_ids, at_once=1)
    if include:
        assert shown == ["The", "The capital", "The capital of", "The capital of Fr"]
    else:
        assert shown == ["The", "The capital", "The capital ", "The capital "]


def test_of_matches_that_end_together_the_longest_counts() -> None:
    stops = StopStrings(("b", "ab", "bab"), include=False)
    assert stops.find("aab", 0) == StopMatch("ab", 1, 3)
    assert stops.cut("aab", StopMatch("ab", 1, 3)) == "a"


def test_a_match_may_begin_in_old_text_and_must_not_end_there() -> None:
    stops = StopStrings(("aba",), include=False)
    assert stops.find("xaba", 3) == StopMatch("aba", 1, 4)
    assert stops.find("xaba", 4) is None
    assert stops.find("xababa", 4) == StopMatch("aba", 3, 6)


def test_without_stop_strings_all_is_shown() -> None:
    stops = StopStrings((), include=False)
    assert stops.find("text", 0) is None
    assert stops.visible("text") == "text"

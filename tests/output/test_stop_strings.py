from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from pagedserve.output.beam import Beam
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.output.judge import Living, RequestStep, judge
from pagedserve.output.processor import OutputProcessor
from pagedserve.output.state import OutputState
from pagedserve.output.stop import StopRule
from pagedserve.output.stop_strings import StopMatch, StopStrings
from pagedserve.outputs import CompletionOutput
from pagedserve.sampling.results import Candidates, SampledRows
from pagedserve.sampling_params import SamplingParams

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


ROW = np.zeros(1, np.int32)
NO_DRAW = np.zeros(2, np.int64)
BEAMS: dict[str, Any] = {"use_beam_search": True, "best_of": 2, "temperature": 0}


@dataclass
class Serving:
    """Feeds a request with tokens that are known beforehand."""

    processor: OutputProcessor
    token_ids: list[int]

    def open(self, *, follow: bool, **params: Any) -> OutputState:
        parameters = SamplingParams(max_tokens=len(self.token_ids), ignore_eos=True, **params)
        return self.processor.open(
            request_id="a",
            prompt=None,
            prompt_token_ids=[1],
            params=parameters,
            rule=StopRule.from_params(parameters, eos_token_ids=[], max_new_tokens=1000),
            arrival_time=0.0,
            is_followed=follow,
        )

    def sampled(self, *, follow: bool, **params: Any) -> tuple[list[str], CompletionOutput]:
        """What is shown of a sampled sequence, and its end."""
        state = self.open(follow=follow, **params)
        shown = []
        for token in self.token_ids:
            drawn = SampledRows(np.array([token], np.int32), np.arange(2), None, None, {})
            step = self._take(Living(state, state.sequences[0]), drawn)
            if step.is_done:
                break
            if follow:
                shown.append(self.processor.follow(state).outputs[0].text)
        return shown, self.processor.conclude(state, None, 1.0).outputs[0]

    def searched(self, **params: Any) -> CompletionOutput:
        """The end of a beam search that has no choice."""
        state = self.open(follow=False, **params, **BEAMS)
        beam = Beam() if state.search is None else state.search.beams[0]
        for token in self.token_ids:
            choice = np.array([[token, (token + 1) % 2]], np.int32)
            only = Candidates(choice, np.array([[0.0, -np.inf]], np.float32))
            none = np.zeros(0, np.int32)
            step = self._take(Living(state, beam), SampledRows(none, NO_DRAW, None, only, {}))
            if step.is_done or step.search is None:
                break
            beam = step.search.beams[0]
        return self.processor.conclude(state, None, 1.0).outputs[0]

    def _take(self, living: Living, sampled: SampledRows) -> RequestStep:
        (step,) = judge([living], ROW, sampled).requests
        self.processor.apply([step], [], 1.0)
        return step


def check_serving(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], data: st.DataObject
) -> None:
    """With stop strings cut from the text itself, so that they overlap and match, and stop tokens.

    Sampled and followed, sampled alone, and as a beam: all end alike.
    """
    skips = data.draw(st.booleans())
    decode = Detokenizer(tokenizer, skip_special_tokens=skips).decode
    text = decode(token_ids)
    spans = data.draw(st.lists(st.tuples(st.integers(0, len(text)), st.integers(1, 6))))
    stops = StopStrings(
        tuple(sorted({text[start : start + length] for start, length in spans} - {""})),
        include=data.draw(st.booleans()),
    )
    params: dict[str, Any] = {
        "stop": stops.strings,
        "stop_token_ids": data.draw(st.lists(st.sampled_from(token_ids), max_size=1)),
        "min_tokens": data.draw(st.one_of(st.just(0), st.integers(0, len(token_ids)))),
        "include_stop_str_in_output": stops.include,
        "skip_special_tokens": skips,
    }
    serving = Serving(OutputProcessor(tokenizer), token_ids)
    shown, end = serving.sampled(follow=True, **params)
    for before, after in pairwise([*shown, end.text]):
        assert after.startswith(before)
    assert serving.sampled(follow=False, **params) == ([], end)
    assert replace(serving.searched(**params), cumulative_logprob=None) == end
    if end.finish_reason == "stop":
        assert len(end.token_ids) > params["min_tokens"]
    if params["min_tokens"] == 0:
        assert (end.text, end.stop_reason) == expected(decode, stops, token_ids, params)


def expected(
    decode: Callable[[Sequence[int]], str],
    stops: StopStrings,
    token_ids: list[int],
    params: dict[str, Any],
) -> tuple[str, int | str | None]:
    """How tokens end, seen from their whole text: the text, and what ended it."""
    (stop_token,) = params["stop_token_ids"] or [None]
    count = token_ids.index(stop_token) if stop_token is not None else len(token_ids)
    text = decode(token_ids[:count])
    match = first_match(stops, text)
    if match:
        return stops.cut(text, match), match.string
    return (decode(token_ids[: count + 1]) if stops.include else text), stop_token


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
    check_serving(toy_tokenizer, data.draw(st.lists(some_id, min_size=1, max_size=30)), data)


@PROPERTY
@given(data=st.data())
def test_random_text_is_served_up_to_its_first_stop(
    toy_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    encoded = TEXT.map(lambda text: toy_tokenizer(text).input_ids).filter(bool)
    check_serving(toy_tokenizer, data.draw(encoded), data)


@PROPERTY
@given(data=st.data())
def test_tokens_of_the_real_vocabulary_are_served_up_to_their_first_stop(
    real_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    # The first few hundred hold the special tokens and the single bytes.
    some_id = st.one_of(st.integers(0, 300), st.integers(0, len(real_tokenizer) + 3))
    encoded = TEXT.map(lambda text: real_tokenizer(text).input_ids).filter(bool)
    token_ids = data.draw(st.one_of(encoded, st.lists(some_id, min_size=1, max_size=30)))
    check_serving(real_tokenizer, token_ids, data)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_within_a_token_cuts_it(
    real_tokenizer: PreTrainedTokenizerBase, include: bool
) -> None:
    token_ids = real_tokenizer("The capital of France is Paris").input_ids
    serving = Serving(OutputProcessor(real_tokenizer), token_ids)
    stop = ["of Fr", "France"]
    shown, end = serving.sampled(follow=True, stop=stop, include_stop_str_in_output=include)
    if include:
        assert [*shown, end.text] == ["The", "The capital", "The capital of", "The capital of Fr"]
    else:
        assert [*shown, end.text] == ["The", "The capital", "The capital ", "The capital "]


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

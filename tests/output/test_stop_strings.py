from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pagedserve.engine.output_processor import make_output
from pagedserve.engine.request import Request
from pagedserve.engine.step import process_step
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.output.stop import StopMatch, StopStrings
from pagedserve.outputs import CompletionOutput
from pagedserve.sampling.results import Candidates, SampledRows
from pagedserve.sampling_params import RequestOutputKind
from tests.output.conftest import byte_fallback
from tests.support.examples import examples
from tests.support.serving import end, feed, make_request, record

# The fixtures are read-only, so one serves all examples.
PROPERTY = settings(
    max_examples=examples(100, all_of_them=300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
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
    for count in range(num_old + 1, len(text) + 1):
        ending = [string for string in stops.strings if text[:count].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return StopMatch(longest, count - len(longest), count)
    return None


def ended(stops: StopStrings, text: str) -> str:
    """The output that a whole text gives."""
    match = first_match(stops, text)
    return stops.cut(text, match) if match else text


NO_DRAW = np.zeros(2, np.int64)
BEAMS: dict[str, Any] = {"use_beam_search": True, "best_of": 2, "temperature": 0}


@dataclass
class Serving:
    """Feeds a request with tokens that are known beforehand."""

    tokenizer: PreTrainedTokenizerBase
    token_ids: list[int]

    def open(self, kind: RequestOutputKind, **params: Any) -> Request:
        num_tokens = len(self.token_ids)
        return make_request(
            self.tokenizer, max_tokens=num_tokens, ignore_eos=True, output_kind=kind, **params
        )

    def sampled(
        self, kind: RequestOutputKind, **params: Any
    ) -> tuple[list[CompletionOutput], CompletionOutput]:
        """What is shown of a sampled sequence, and its end."""
        request = self.open(kind, **params)
        shown = []
        for token in self.token_ids:
            feed(request, token)
            if request.is_finished:
                break
            if kind is not RequestOutputKind.FINAL_ONLY:
                shown += make_output(request).outputs
        return shown, end(request).outputs[0]

    def searched(self, **params: Any) -> CompletionOutput:
        """The end of a beam search that has no choice."""
        request = self.open(RequestOutputKind.FINAL_ONLY, **params, **BEAMS)
        for token in self.token_ids:
            choice = np.array([[token, (token + 1) % 2]], np.int32)
            only = Candidates(choice, np.array([[0.0, -np.inf]], np.float32))
            sampled = SampledRows(np.zeros(0, np.int32), NO_DRAW, None, only, {})
            record(process_step(request.sequences, sampled))
            if request.is_finished:
                break
        return end(request).outputs[0]


def check_serving(
    tokenizer: PreTrainedTokenizerBase, token_ids: list[int], data: st.DataObject
) -> None:
    """With stop strings cut from the text itself, so that they overlap and match, and stop tokens.

    Sampled with outputs of every kind, and as a beam: all end alike.
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
    serving = Serving(tokenizer, token_ids)
    shown, last = serving.sampled(RequestOutputKind.CUMULATIVE, **params)
    for before, after in pairwise([*shown, last]):
        assert after.text.startswith(before.text)
    assert serving.sampled(RequestOutputKind.FINAL_ONLY, **params) == ([], last)
    deltas, final = serving.sampled(RequestOutputKind.DELTA, **params)
    assert [delta.text for delta in deltas] == [
        after.text[len(before) :]
        for before, after in zip(["", *(output.text for output in shown)], shown, strict=False)
    ]
    assert "".join(delta.text for delta in [*deltas, final]) == last.text
    assert [token for delta in [*deltas, final] for token in delta.token_ids] == last.token_ids
    assert (final.finish_reason, final.stop_reason) == (last.finish_reason, last.stop_reason)
    assert replace(serving.searched(**params), cumulative_logprob=None) == last
    if last.finish_reason == "stop":
        assert len(last.token_ids) > params["min_tokens"]
    if params["min_tokens"] == 0:
        assert (last.text, last.stop_reason) == expected(decode, stops, token_ids, params)


def expected(
    decode: Callable[[Sequence[int]], str],
    stops: StopStrings,
    token_ids: list[int],
    params: dict[str, Any],
) -> tuple[str, int | str | None]:
    """How tokens end, seen from their texts up to each token: the text, and what ended it."""
    (stop_token,) = params["stop_token_ids"] or [None]
    count = token_ids.index(stop_token) if stop_token is not None else len(token_ids)
    texts = [decode(token_ids[:end]) for end in range(1, count + 1)]
    whole = [text for text in texts[:-1] if not text.endswith("\ufffd")]
    for text in [*whole, *texts[-1:]]:
        if match := first_match(stops, text):
            return stops.cut(text, match), match.string
    text = texts[-1] if texts else ""
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
    serving = Serving(real_tokenizer, token_ids)
    kind = RequestOutputKind.CUMULATIVE
    shown, last = serving.sampled(
        kind, stop=["of Fr", "France"], include_stop_str_in_output=include
    )
    texts = [completion.text for completion in [*shown, last]]
    if include:
        assert texts == ["The", "The capital", "The capital of", "The capital of Fr"]
    else:
        assert texts == ["The", "The capital", "The capital ", "The capital "]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("tokens", "stop"),
    [
        (["▁a", "<0x0A>"], "\n"),
        (["c", "<0xE2>", "<0x82>", "<0xAC>"], "€"),
        (["c", "<0xE2>", "<0x82>", "<0xAC>", "<0xC3>", "<0xA9>"], "€é"),
        (["▁a", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>"], "a€\n"),
    ],
)
def test_a_stop_string_that_ends_in_a_byte_token_stops_at_once(
    tokens: list[str], stop: str, include: bool
) -> None:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=byte_fallback())
    token_ids: list[int] = tokenizer.convert_tokens_to_ids(tokens)
    text: str = tokenizer.decode(token_ids)
    later = tokenizer.convert_tokens_to_ids(["<0xFF>", "c"])  # would change what is not at an end
    serving = Serving(tokenizer, [*token_ids, *later])
    for kind in RequestOutputKind:
        params: dict[str, Any] = {"stop": ["x", stop], "include_stop_str_in_output": include}
        shown, last = serving.sampled(kind, **params)
        outputs = [*shown, last] if kind is RequestOutputKind.DELTA else [last]
        assert "".join(output.text for output in outputs) == (
            text if include else text.removesuffix(stop)
        )
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        assert [token for output in outputs for token in output.token_ids] == token_ids
    assert serving.searched(**params).token_ids == token_ids


def test_a_stop_string_of_bytes_among_the_first_tokens_does_not_count() -> None:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=byte_fallback())
    tokens = ["<0x0A>", "c", "<0x0A>", "c"]
    serving = Serving(tokenizer, tokenizer.convert_tokens_to_ids(tokens))
    _, last = serving.sampled(RequestOutputKind.CUMULATIVE, stop=["\n"], min_tokens=1)
    assert (last.text, len(last.token_ids)) == ("\nc", 3)


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

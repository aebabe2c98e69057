"""What a step's tokens mean, and what the caller sees of them."""

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from pagedserve.engine.output_processor import make_output
from pagedserve.engine.request import Request, RequestTable
from pagedserve.engine.step import process_step, record_step
from pagedserve.output.stop import Finish
from pagedserve.outputs import RequestOutput
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling_params import RequestOutputKind
from tests.support.serving import drawn, end, feed, living, make_request

EOS = 2
KINDS = list(RequestOutputKind)


@pytest.fixture
def open_request(real_tokenizer: PreTrainedTokenizerBase) -> Any:
    def open_one(**params: Any) -> Request:
        return make_request(real_tokenizer, eos_token_ids=[EOS], **({"max_tokens": 10} | params))

    return open_one


def generated(request: Request) -> list[int]:
    return request.sequences[0].token_ids


def test_processing_records_nothing(open_request: Any) -> None:
    going, ending = open_request(), open_request()
    update = process_step(living([going, ending]), drawn([500, EOS]))
    assert (update.parents, update.tokens) == ([0, 1], [500, EOS])
    assert update.finish_flags().tolist() == [0, 1]
    assert update.finish_flags().dtype == np.uint8
    assert generated(going) == generated(ending) == []
    assert going.metrics.first_token_time is None


def test_rows_of_a_request_that_has_ended_are_passed_over(open_request: Any) -> None:
    ended, going = open_request(), open_request()
    ended.is_finished = True
    update = process_step([ended.sequences[0], going.sequences[0]], drawn([500, 501]))
    assert (update.parents, update.tokens) == ([1], [501])


def test_the_first_row_of_several_makes_them_all(open_request: Any) -> None:
    request = open_request(n=3)
    update = process_step(request.sequences, drawn([500, EOS, 501], num_draws=3))
    assert update.parents == [0, 0, 0]
    table = RequestTable()
    assert record_step(update, [7, 8, 9], table, 3.0) == [request]
    assert [sequence.token_ids for sequence in request.sequences] == [[500], [EOS], [501]]
    assert [(sequence.handle, sequence.index) for sequence in living([request])] == [(7, 0), (9, 2)]
    assert table.by_handles([7, 9]) == living([request])


def test_the_first_token_time_stays_and_the_last_goes_on(open_request: Any) -> None:
    request = open_request()
    for now in (3.0, 4.0):
        feed(request, 500, now=now)
    assert request.metrics.first_token_time == 3.0
    assert request.metrics.last_token_time == 4.0
    assert request.metrics.time_to_first_token == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_every_kind_say_the_same_in_the_end(
    open_request: Any, real_tokenizer: PreTrainedTokenizerBase, kind: RequestOutputKind
) -> None:
    request = open_request(output_kind=kind)
    texts, tokens = [], []
    for token in [*real_tokenizer("Hello 日本").input_ids, EOS]:
        feed(request, token)
        output = make_output(request)
        assert output.finished == (token == EOS)
        texts.append(output.outputs[0].text)
        tokens.append(output.outputs[0].token_ids)
    completion = output.outputs[0]
    is_delta = kind is RequestOutputKind.DELTA
    assert ("".join(texts) if is_delta else completion.text) == "Hello 日本"
    assert [len(listed) for listed in tokens] == (
        [1] * len(tokens) if is_delta else list(range(1, len(tokens) + 1))
    )
    assert completion.token_ids[-1] == EOS
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_a_delta_covers_all_that_came_since_the_last(
    open_request: Any, real_tokenizer: PreTrainedTokenizerBase
) -> None:
    request = open_request(output_kind=RequestOutputKind.DELTA, max_tokens=50)
    token_ids = real_tokenizer("One two three four").input_ids
    for token in token_ids[:-1]:
        feed(request, token)
    first = make_output(request).outputs[0]
    feed(request, token_ids[-1])
    second = make_output(request).outputs[0]
    assert (first.token_ids, second.token_ids) == (token_ids[:-1], token_ids[-1:])
    assert first.text + second.text == "One two three four"
    assert make_output(request).outputs[0].token_ids == []


def test_deltas_of_several_sequences_tell_of_each_end_once(open_request: Any) -> None:
    request = open_request(n=2, output_kind=RequestOutputKind.DELTA)
    feed(request, 500, EOS, num_draws=2)
    shown = make_output(request).outputs
    assert [(completion.index, completion.finish_reason) for completion in shown] == [
        (0, None),
        (1, "stop"),
    ]
    feed(request, 501)
    shown = make_output(request).outputs
    assert [(completion.index, completion.token_ids) for completion in shown] == [(0, [501])]
    feed(request, EOS)
    (last,) = make_output(request).outputs
    assert (last.index, last.token_ids, last.finish_reason) == (0, [EOS], "stop")


def test_what_a_delta_brought_is_forgotten(
    open_request: Any, real_tokenizer: PreTrainedTokenizerBase
) -> None:
    text = "word after word " * 40
    request = open_request(output_kind=RequestOutputKind.DELTA, max_tokens=1000, stop="\n\n\n")
    kept = []
    for token in real_tokenizer(text).input_ids:
        feed(request, token)
        make_output(request)
        kept.append(len(request.sequences[0].text.text))
    assert max(kept) <= 3


def test_outputs_do_not_change_later(open_request: Any) -> None:
    request = open_request()
    feed(request, 500)
    first = make_output(request)
    feed(request, 501)
    assert first.outputs[0].token_ids == [500]


def served(
    request: Request, tokenizer: PreTrainedTokenizerBase, text: str
) -> tuple[list[str], RequestOutput]:
    """What a follower of ``text`` sees, and the last output."""
    shown = []
    for token in tokenizer(text).input_ids:
        feed(request, token)
        if request.is_finished:
            break
        shown.append(make_output(request).outputs[0].text)
    return shown, end(request, None if request.is_finished else Finish("length"))


@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [("lo wor", False, "Hel"), ("lo wor", True, "Hello wor"), (["xyz", "ello"], False, "H")],
)
def test_a_stop_string_cuts_the_text_wherever_it_lies(
    open_request: Any,
    real_tokenizer: PreTrainedTokenizerBase,
    stop: Any,
    text: str,
    *,
    include: bool,
) -> None:
    request = open_request(max_tokens=50, stop=stop, include_stop_str_in_output=include)
    shown, last = served(request, real_tokenizer, "Hello world, hello")
    completion = last.outputs[0]
    assert completion.text == text
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == (stop if isinstance(stop, str) else "ello")
    assert all(text.startswith(beginning) for beginning in shown)


def test_a_stop_string_among_the_first_tokens_does_not_count(
    open_request: Any, real_tokenizer: PreTrainedTokenizerBase
) -> None:
    request = open_request(max_tokens=50, stop="ab", min_tokens=2)
    _, last = served(request, real_tokenizer, "ab ab ab")
    assert last.outputs[0].text == "ab ab "
    assert last.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("min_tokens", "text", "reason"), [(0, "ok ", "stop"), (20, "ok \ufffd", "length")]
)
def test_a_stop_string_may_be_complete_only_when_nothing_more_comes(
    open_request: Any,
    real_tokenizer: PreTrainedTokenizerBase,
    min_tokens: int,
    text: str,
    reason: str,
) -> None:
    request = open_request(stop="\ufffd", min_tokens=min_tokens, max_tokens=50)
    for token in real_tokenizer("ok 𐍈").input_ids[:-1]:  # the character stays incomplete
        feed(request, token)
    (completion,) = end(request, Finish("length")).outputs
    assert (completion.text, completion.finish_reason) == (text, reason)


def test_without_detokenising_there_is_no_text(
    open_request: Any, real_tokenizer: PreTrainedTokenizerBase
) -> None:
    request = open_request(max_tokens=50, detokenize=False)
    shown, last = served(request, real_tokenizer, "Hello")
    assert {*shown, last.outputs[0].text} == {""}
    assert last.outputs[0].token_ids == real_tokenizer("Hello").input_ids


def test_special_tokens_are_shown_if_wanted(open_request: Any) -> None:
    request = open_request(skip_special_tokens=False, ignore_eos=True)
    feed(request, EOS)
    assert "<|" in end(request, Finish("length")).outputs[0].text


@pytest.mark.parametrize("stop", [[], ["never"]])
@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
@pytest.mark.parametrize("include", [True, False])
def test_the_token_that_ends_it_is_in_the_text_if_wanted(
    open_request: Any,
    real_tokenizer: PreTrainedTokenizerBase,
    stop: list[str],
    *,
    kind: RequestOutputKind,
    include: bool,
) -> None:
    *before, last = token_ids = real_tokenizer("Hello big world").input_ids
    request = open_request(
        output_kind=kind,
        n=2,
        stop=stop,
        stop_token_ids=[last],
        include_stop_str_in_output=include,
    )
    feed(request, before[0], before[0], num_draws=2)
    for token in token_ids[1:]:
        feed(request, token, before[0])
    shown = {real_tokenizer.decode(token_ids if include else before)}
    if kind is RequestOutputKind.CUMULATIVE:
        shown.add(make_output(request).outputs[0].text)
    completion = end(request, Finish("abort")).outputs[0]
    assert shown == {completion.text}
    assert completion.token_ids == token_ids
    assert (completion.finish_reason, completion.stop_reason) == ("stop", last)


def test_what_a_caller_does_to_an_output_is_seen_nowhere_else(open_request: Any) -> None:
    request = open_request()
    feed(request, 500)
    make_output(request).outputs[0].token_ids.clear()
    assert end(request, Finish("length")).outputs[0].token_ids == [500]


@pytest.mark.parametrize("params", [{}, {"n": 2}])
def test_a_request_that_failed_at_once_has_no_time_of_a_first_token(
    open_request: Any, params: dict[str, Any]
) -> None:
    request = open_request(**params)
    failed = SampledRows(np.zeros(1, np.int32), np.arange(2), None, None, {0: "bad"})
    update = process_step(request.sequences, failed)
    assert record_step(update, [], RequestTable(), 3.0) == [request]
    assert request.is_finished
    assert make_output(request).outputs[0].stop_reason == "bad"
    assert request.metrics.time_to_first_token is None

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from pagedserve.output.judge import JudgedStep, Living, judge
from pagedserve.output.processor import OutputProcessor
from pagedserve.output.state import OutputState
from pagedserve.output.stop import Finish, StopRule
from pagedserve.outputs import RequestOutput
from pagedserve.sampling.results import SampledRows
from pagedserve.sampling_params import SamplingParams

EOS = 2


@pytest.fixture
def processor(real_tokenizer: PreTrainedTokenizerBase) -> OutputProcessor:
    return OutputProcessor(real_tokenizer)


def opened(processor: OutputProcessor, *, follow: bool = True, **params: Any) -> OutputState:
    parameters = SamplingParams(**({"max_tokens": 10} | params))
    return processor.open(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1],
        params=parameters,
        rule=StopRule.from_params(parameters, eos_token_ids=[EOS], max_new_tokens=100),
        arrival_time=1.0,
        is_followed=follow,
    )


def judged(states: list[OutputState], tokens: list[int], *, num_draws: int = 1) -> JudgedStep:
    """A step in which each state's living sequences get the next of ``tokens``."""
    rows = [
        Living(state, sequence)
        for state in states
        for sequence in state.sequences
        if sequence.finish is None
    ]
    starts = np.arange(len(rows) + 1) * num_draws
    drawn = SampledRows(np.array(tokens, dtype=np.int32), starts, None, None, {})
    return judge(rows, np.arange(len(rows), dtype=np.int32), drawn)


def feed(processor: OutputProcessor, state: OutputState, token: int, now: float = 3.0) -> None:
    processor.apply(judged([state], [token]).requests, [], now)


def generated(state: OutputState) -> list[int]:
    return state.sequences[0].token_ids


def test_judging_records_nothing(processor: OutputProcessor) -> None:
    going, ending = opened(processor), opened(processor)
    step = judged([going, ending], [500, EOS])
    assert (step.parent_rows.tolist(), step.tokens.tolist()) == ([0, 1], [500, EOS])
    assert step.finish_flags.tolist() == [0, 1]
    assert step.finish_flags.dtype == np.uint8
    assert generated(going) == generated(ending) == []
    assert going.metrics.first_token_time is None


def test_applying_twice_records_once(processor: OutputProcessor) -> None:
    one = opened(processor)
    for token in (500, 501):
        step = judged([one], [token])
        processor.apply(step.requests, [], 3.0)
        processor.apply(step.requests, [], 3.0)
    assert generated(one) == [500, 501]


def test_the_first_row_of_several_makes_them_all(processor: OutputProcessor) -> None:
    one = opened(processor, n=3)
    step = judged([one], [500, EOS, 501], num_draws=3)
    assert step.parent_rows.tolist() == [0, 0, 0]
    for _ in range(2):
        processor.apply(step.requests, [], 3.0)
    assert [sequence.token_ids for sequence in one.sequences] == [[500], [EOS], [501]]
    handles = step.requests[0].living([7, 8, 9])
    assert [(handle, sequence.index) for handle, sequence in handles] == [(7, 0), (9, 2)]  # type: ignore[union-attr]  # no beams


def test_the_first_token_time_stays(processor: OutputProcessor) -> None:
    one = opened(processor)
    for now in (3.0, 4.0):
        feed(processor, one, 500, now)
    assert one.metrics.first_token_time == 3.0
    assert one.metrics.time_to_first_token == 2.0


@pytest.mark.parametrize("follow", [True, False])
def test_the_last_output_is_the_same_followed_or_not(
    processor: OutputProcessor, real_tokenizer: PreTrainedTokenizerBase, *, follow: bool
) -> None:
    one = opened(processor, follow=follow)
    for token in [*real_tokenizer("Hello 日本").input_ids, EOS]:
        feed(processor, one, token)
        if follow:
            assert not processor.follow(one).finished
    output = processor.conclude(one, None, 5.0)
    completion = output.outputs[0]
    assert completion.text == "Hello 日本"
    assert completion.token_ids[-1] == EOS
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert output.finished
    assert output.metrics.finished_time == 5.0


def test_outputs_do_not_change_later(processor: OutputProcessor) -> None:
    one = opened(processor)
    feed(processor, one, 500)
    first = processor.follow(one)
    feed(processor, one, 501)
    assert first.outputs[0].token_ids == [500]


def served(
    processor: OutputProcessor, tokenizer: PreTrainedTokenizerBase, text: str, **params: Any
) -> tuple[list[str], RequestOutput]:
    """What a follower of ``text`` sees, and the last output."""
    one = opened(processor, max_tokens=50, **params)
    shown = []
    for token in tokenizer(text).input_ids:
        feed(processor, one, token)
        if one.sequences[0].finish is not None:
            break
        shown.append(processor.follow(one).outputs[0].text)
    return shown, processor.conclude(one, Finish("length"), 5.0)


@pytest.mark.parametrize(
    ("stop", "include", "text"),
    [("lo wor", False, "Hel"), ("lo wor", True, "Hello wor"), (["xyz", "ello"], False, "H")],
)
def test_a_stop_string_cuts_the_text_wherever_it_lies(
    processor: OutputProcessor,
    real_tokenizer: PreTrainedTokenizerBase,
    stop: Any,
    text: str,
    *,
    include: bool,
) -> None:
    shown, last = served(
        processor,
        real_tokenizer,
        "Hello world, hello",
        stop=stop,
        include_stop_str_in_output=include,
    )
    completion = last.outputs[0]
    assert completion.text == text
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == (stop if isinstance(stop, str) else "ello")
    assert all(text.startswith(one) for one in shown)


def test_a_stop_string_among_the_first_tokens_does_not_count(
    processor: OutputProcessor, real_tokenizer: PreTrainedTokenizerBase
) -> None:
    _, last = served(processor, real_tokenizer, "ab ab ab", stop="ab", min_tokens=2)
    assert last.outputs[0].text == "ab ab "
    assert last.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("min_tokens", "text", "reason"), [(0, "ok ", "stop"), (20, "ok \ufffd", "length")]
)
def test_a_stop_string_may_be_complete_only_when_nothing_more_comes(
    processor: OutputProcessor,
    real_tokenizer: PreTrainedTokenizerBase,
    min_tokens: int,
    text: str,
    reason: str,
) -> None:
    one = opened(processor, stop="\ufffd", min_tokens=min_tokens, max_tokens=50)
    for token in real_tokenizer("ok 𐍈").input_ids[:-1]:  # the character stays incomplete
        feed(processor, one, token)
    (completion,) = processor.conclude(one, Finish("length"), 5.0).outputs
    assert (completion.text, completion.finish_reason) == (text, reason)


def test_without_detokenising_there_is_no_text(
    processor: OutputProcessor, real_tokenizer: PreTrainedTokenizerBase
) -> None:
    shown, last = served(processor, real_tokenizer, "Hello", detokenize=False)
    assert {*shown, last.outputs[0].text} == {""}
    assert last.outputs[0].token_ids == real_tokenizer("Hello").input_ids


def test_special_tokens_are_shown_if_wanted(processor: OutputProcessor) -> None:
    one = opened(processor, skip_special_tokens=False, ignore_eos=True)
    feed(processor, one, EOS)
    assert "<|" in processor.conclude(one, None, 5.0).outputs[0].text


@pytest.mark.parametrize("stop", [[], ["never"]])
@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_the_token_that_ends_it_is_in_the_text_if_wanted(
    processor: OutputProcessor,
    real_tokenizer: PreTrainedTokenizerBase,
    stop: list[str],
    *,
    follow: bool,
    include: bool,
) -> None:
    *before, last = token_ids = real_tokenizer("Hello big world").input_ids
    one = opened(
        processor,
        follow=follow,
        n=2,
        stop=stop,
        stop_token_ids=[last],
        include_stop_str_in_output=include,
    )
    processor.apply(judged([one], [before[0], before[0]], num_draws=2).requests, [], 3.0)
    for token in token_ids[1:]:
        processor.apply(judged([one], [token, before[0]]).requests, [], 3.0)
    shown = {real_tokenizer.decode(token_ids if include else before)}
    if follow:
        shown.add(processor.follow(one).outputs[0].text)
    completion = processor.conclude(one, Finish("abort"), 5.0).outputs[0]
    assert shown == {completion.text}
    assert completion.token_ids == token_ids
    assert (completion.finish_reason, completion.stop_reason) == ("stop", last)


def test_what_a_caller_does_to_an_output_is_seen_nowhere_else(processor: OutputProcessor) -> None:
    one = opened(processor)
    feed(processor, one, 500)
    processor.follow(one).outputs[0].token_ids.clear()
    assert processor.conclude(one, Finish("length"), 5.0).outputs[0].token_ids == [500]


def test_a_request_that_failed_at_once_has_no_time_of_a_first_token(
    processor: OutputProcessor,
) -> None:
    one = opened(processor)
    failed = SampledRows(np.zeros(1, np.int32), np.arange(2), None, None, {0: "bad"})
    rows = [Living(one, one.sequences[0])]
    processor.apply(judge(rows, np.zeros(1, np.int32), failed).requests, [], 3.0)
    assert one.metrics.time_to_first_token is None

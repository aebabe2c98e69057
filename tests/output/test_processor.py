import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from pagedserve.output.detokenizer import Detokenizer
from pagedserve.output.processor import OutputProcessor, OutputState
from pagedserve.output.stop import Finish, StopRule
from pagedserve.outputs import RequestMetrics
from pagedserve.sampling_params import SamplingParams

EOS = 2


@pytest.fixture
def processor(real_tokenizer: PreTrainedTokenizerBase) -> OutputProcessor:
    return OutputProcessor(Detokenizer(real_tokenizer))


def state(processor: OutputProcessor, *, follow: bool = True, max_tokens: int = 10) -> OutputState:
    params = SamplingParams(max_tokens=max_tokens)
    return OutputState(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1],
        rule=StopRule.from_params(params, eos_token_ids=[EOS], max_new_tokens=100),
        metrics=RequestMetrics(arrival_time=1.0),
        text_stream=processor.open_stream() if follow else None,
    )


def test_judging_records_nothing(processor: OutputProcessor) -> None:
    going, ending = state(processor), state(processor)
    step = processor.judge([going, ending], np.array([500, EOS], dtype=np.int32))
    assert step.finish_flags.tolist() == [0, 1]
    assert step.finish_flags.dtype == np.uint8
    assert going.token_ids == ending.token_ids == []
    assert going.metrics.first_token_time is None


def test_applying_twice_records_once(processor: OutputProcessor) -> None:
    one = state(processor)
    for tokens in ([500], [501]):
        step = processor.judge([one], np.array(tokens, dtype=np.int32))
        processor.apply(step, 3.0)
        processor.apply(step, 3.0)
    assert one.token_ids == [500, 501]


def test_the_first_token_time_stays(processor: OutputProcessor) -> None:
    one = state(processor)
    for now in (3.0, 4.0):
        processor.apply(processor.judge([one], np.array([500], dtype=np.int32)), now)
    assert one.metrics.first_token_time == 3.0
    assert one.metrics.time_to_first_token == 2.0


@pytest.mark.parametrize("follow", [True, False])
def test_the_last_output_is_the_same_followed_or_not(
    processor: OutputProcessor, real_tokenizer: PreTrainedTokenizerBase, *, follow: bool
) -> None:
    one = state(processor, follow=follow)
    for token in [*real_tokenizer("Hello 日本").input_ids, EOS]:
        processor.apply(processor.judge([one], np.array([token], dtype=np.int32)), 3.0)
        if follow:
            assert not processor.follow(one).finished
    output = processor.conclude(one, Finish("stop"), 5.0)
    completion = output.outputs[0]
    assert completion.text == "Hello 日本"
    assert completion.token_ids[-1] == EOS
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert output.finished
    assert output.metrics.finished_time == 5.0


def test_outputs_do_not_change_later(processor: OutputProcessor) -> None:
    one = state(processor)
    processor.apply(processor.judge([one], np.array([500], dtype=np.int32)), 3.0)
    first = processor.follow(one)
    processor.apply(processor.judge([one], np.array([501], dtype=np.int32)), 4.0)
    assert first.outputs[0].token_ids == [500]

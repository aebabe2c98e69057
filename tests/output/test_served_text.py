"""The text of a request from its first token to its last, through the code that serves it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from pagedserve.output.beam import Beam
from pagedserve.output.detokenizer import Detokenizer
from pagedserve.output.judge import Living, RequestStep, judge
from pagedserve.output.processor import OutputProcessor
from pagedserve.output.state import OutputState
from pagedserve.output.stop import StopRule
from pagedserve.outputs import CompletionOutput
from pagedserve.sampling.logprobs import Candidates
from pagedserve.sampling.sampler import SampledRows
from pagedserve.sampling_params import SamplingParams

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
            rule=StopRule.from_params(parameters, eos_token_ids=[], max_new_tokens=100),
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


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_followed_or_not_sampled_or_searched_a_text_is_the_same(
    toy_tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    """With stop strings cut from the text, stop tokens, and a least number of tokens."""
    ids = st.integers(0, len(toy_tokenizer) - 1)
    token_ids = data.draw(st.lists(ids, min_size=1, max_size=20))
    text = Detokenizer(toy_tokenizer).decode(token_ids)
    spans = data.draw(st.lists(st.tuples(st.integers(0, len(text)), st.integers(1, 4)), max_size=3))
    params: dict[str, Any] = {
        "stop": sorted({text[start : start + length] for start, length in spans} - {""}),
        "stop_token_ids": data.draw(st.lists(st.sampled_from(token_ids), max_size=1)),
        "min_tokens": data.draw(st.integers(0, len(token_ids))),
        "include_stop_str_in_output": data.draw(st.booleans()),
    }
    serving = Serving(OutputProcessor(toy_tokenizer), token_ids)
    shown, followed = serving.sampled(follow=True, **params)
    assert serving.sampled(follow=False, **params) == ([], followed)
    searched = serving.searched(**params)
    assert searched.token_ids == followed.token_ids
    assert searched.text == followed.text
    ends = [(one.finish_reason, one.stop_reason) for one in (searched, followed)]
    assert ends[0] == ends[1]
    for before, after in pairwise([*shown, followed.text]):
        assert after.startswith(before)
    if followed.finish_reason == "stop":
        assert len(followed.token_ids) > params["min_tokens"]
    if isinstance(followed.stop_reason, int) and not params["include_stop_str_in_output"]:
        assert followed.text == Detokenizer(toy_tokenizer).decode(followed.token_ids[:-1])

"""Whatever breaks in the middle of a step, requests and scheduler stay together."""

import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import pytest

from pagedserve import LLMEngine, RequestOutput, SamplingParams, StepError
from pagedserve.executor.worker import LaunchedStep
from pagedserve.inputs import TokensPrompt

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
STATEFUL = re.compile(r"/pagedserve/(engine|output)/")
SEVERAL = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=3, logprobs=2, stop="zz")
BEAMS = SamplingParams(
    n=2, best_of=3, use_beam_search=True, temperature=0, max_tokens=6, prompt_logprobs=1
)
RANDOM = SamplingParams(max_tokens=9, ignore_eos=True, seed=3, stop="zz")
# What the formula says in the middle of the answers below.
ENDING = SamplingParams(temperature=0, max_tokens=7, stop_token_ids=[65, 219], ignore_eos=True)
NAMES = [str(number) for number in range(4)]


@dataclass(frozen=True)
class Way:
    """How steps are run, and requests that are run so."""

    params: tuple[SamplingParams, ...]
    options: dict[str, Any]

    def engine(self, formula: Any) -> LLMEngine:
        engine: LLMEngine = formula.engine(**self.options)
        for number, name in enumerate(NAMES):
            prompt: TokensPrompt = {"prompt_token_ids": list(range(number + 1))}
            params = self.params[number % len(self.params)]
            engine.add_request(name, prompt, params, final_only=number < 1)
        return engine


WAYS = {
    "one by one": Way((GREEDY, SEVERAL, BEAMS), {}),
    "ahead": Way((GREEDY, RANDOM, ENDING), {"async_scheduling": True}),
    "ahead with little memory": Way(
        (GREEDY, RANDOM, ENDING), {"async_scheduling": True, "num_gpu_blocks": 6}
    ),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def last_outputs(engine: LLMEngine) -> dict[str, RequestOutput]:
    return {output.request_id: output for output in engine.step()}


def answers(outputs: dict[str, RequestOutput]) -> dict[str, tuple[object, object]]:
    """All that a caller is told, but for times."""
    return {name: (one.outputs, one.prompt_logprobs) for name, one in outputs.items()}


@pytest.fixture
def undisturbed(formula: Any, way: Way) -> dict[str, tuple[object, object]]:
    plain = replace(way, options={})
    return answers(formula.finish(plain.engine(formula)))


class FailOnce:
    """Raises in one step, counted from 0."""

    def __init__(self, step: int, error: BaseException) -> None:
        self._step, self._error, self._count = step, error, -1

    def __call__(self) -> None:
        self._count += 1
        if self._count == self._step:
            raise self._error


@pytest.mark.parametrize("error", [RuntimeError("out of order"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_step_that_failed_is_done_again(
    formula: Any,
    way: Way,
    undisturbed: dict[str, tuple[object, object]],
    error: BaseException,
    step: int,
) -> None:
    engine = way.engine(formula)
    formula.executor(engine).before_sampling = FailOnce(step, error)
    outputs: dict[str, RequestOutput] = {}

    def run() -> None:
        while True:
            outputs.update(last_outputs(engine))

    with pytest.raises(type(error)):
        run()
    engine.scheduler.check()
    outputs |= formula.finish(engine)
    assert answers(outputs) == undisturbed
    formula.check_idle(engine)


def test_a_model_that_breaks_the_step_protocol_leaves_the_engine_usable(
    formula: Any,
    way: Way,
    undisturbed: dict[str, tuple[object, object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = way.engine(formula)
    executor = formula.executor(engine)
    with monkeypatch.context() as patch:
        launch = executor.launch

        def broken(*given: Any) -> LaunchedStep:
            launched: LaunchedStep = launch(*given)
            results = launched.results()
            sampled = replace(results.sampled, tokens=results.sampled.tokens - 1000)
            patch.setattr(launched, "results", lambda: results._replace(sampled=sampled))
            return launched

        patch.setattr(executor, "launch", broken)
        # No token is negative: the detokenizer notices, or the scheduler.
        with pytest.raises((OverflowError, StepError)):
            engine.step()
    assert answers(formula.finish(engine)) == undisturbed


def test_requests_aborted_after_a_failure_leave_nothing(formula: Any, way: Way) -> None:
    engine = way.engine(formula)
    formula.executor(engine).before_sampling = FailOnce(2, RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        formula.finish(engine)
    assert len(engine.abort_request(NAMES)) == 4
    formula.check_idle(engine)


def interrupt_at(num_lines: int, call: Callable[[], object]) -> bool:
    """Call with an interrupt at the n-th line that engine and output processing run.

    What they call is left out: it gives results or none.  So is the line that gives the outputs
    of a step away: Python looks for signals after calls, and there is none between forgetting
    them and returning.

    Returns:
        Whether the call ran that many lines.
    """
    left = num_lines

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not STATEFUL.search(frame.f_code.co_filename):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and line.strip() != "return outputs":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


@pytest.mark.parametrize("step", [0, 1, 5])
def test_an_interrupt_at_any_line_of_a_step_loses_nothing(
    formula: Any, way: Way, undisturbed: dict[str, tuple[object, object]], step: int
) -> None:
    num_lines = 1
    while True:
        engine = way.engine(formula)
        outputs: dict[str, RequestOutput] = {}
        for _ in range(step):
            outputs |= last_outputs(engine)
        interrupted = interrupt_at(num_lines, engine.step)
        if not interrupted:
            break
        engine.scheduler.check()
        outputs |= formula.finish(engine)
        assert answers(outputs) == undisturbed, f"interrupted at line {num_lines}"
        formula.check_idle(engine)
        num_lines += 1
    assert num_lines > 50


def test_an_interrupt_at_any_line_of_add_request_adds_all_or_nothing(formula: Any) -> None:
    num_lines = 1
    while True:
        engine = formula.engine()

        def add(engine: LLMEngine = engine) -> None:
            engine.add_request("a", {"prompt_token_ids": [1, 2]}, GREEDY)

        interrupted = interrupt_at(num_lines, add)
        if not interrupted:
            break
        assert engine.scheduler.num_waiting == engine.num_unfinished_requests
        engine.abort_request("a")
        formula.check_idle(engine)
        num_lines += 1
    assert num_lines > 20

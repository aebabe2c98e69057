"""Whatever breaks in the middle of a step, requests and scheduler stay together."""

import importlib
import itertools
import operator
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pagedserve import LLMEngine, RequestOutput, SamplingParams, StepError
from pagedserve.collector import collector_paused
from pagedserve.executor.launched import LaunchedRun
from pagedserve.inputs import TokensPrompt
from pagedserve.sampling_params import RequestOutputKind
from tests.support.formula import FormulaModel

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEVERAL = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=3, logprobs=2, stop="zz")
BEAMS = SamplingParams(
    n=2, best_of=3, use_beam_search=True, temperature=0, max_tokens=6, prompt_logprobs=1
)
RANDOM = SamplingParams(max_tokens=9, ignore_eos=True, seed=3, stop="zz")
# What the formula says in the middle of the answers below.
ENDING = SamplingParams(temperature=0, max_tokens=7, stop_token_ids=[65, 219], ignore_eos=True)
KINDS = [RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE]
NAMES = [str(number) for number in range(4)]


@dataclass(frozen=True)
class Way:
    """How steps are run, and requests that are run so."""

    params: tuple[SamplingParams, ...]
    options: dict[str, Any]

    def engine(self, formula: FormulaModel) -> LLMEngine:
        engine: LLMEngine = formula.engine(**self.options)
        for number, name in enumerate(NAMES):
            prompt: TokensPrompt = {"prompt_token_ids": list(range(number + 1))}
            params = self.params[number % len(self.params)]
            kind = KINDS[number % len(KINDS)]
            engine.add_request(name, prompt, replace(params, output_kind=kind))
        return engine


WAYS = {
    "sync": Way((GREEDY, SEVERAL, BEAMS), {}),
    "async": Way((GREEDY, RANDOM, ENDING), {"async_scheduling": True}),
    "async with little memory": Way(
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
    return {name: (output.outputs, output.prompt_logprobs) for name, output in outputs.items()}


@pytest.fixture
def undisturbed(formula: FormulaModel, way: Way) -> dict[str, tuple[object, object]]:
    plain = replace(way, options={})
    return answers(formula.finish(plain.engine(formula)))


def run(engine: LLMEngine, outputs: dict[str, RequestOutput]) -> None:
    """Step until something raises."""
    while True:
        outputs |= last_outputs(engine)


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
    formula: FormulaModel,
    way: Way,
    undisturbed: dict[str, tuple[object, object]],
    error: BaseException,
    step: int,
) -> None:
    engine = way.engine(formula)
    formula.executor(engine).before_sampling = FailOnce(step, error)
    outputs: dict[str, RequestOutput] = {}
    with pytest.raises(type(error)):
        run(engine, outputs)
    engine.scheduler.check()
    outputs |= formula.finish(engine)
    assert answers(outputs) == undisturbed
    formula.check_idle(engine)


def test_a_model_that_breaks_the_step_protocol_leaves_the_engine_usable(
    formula: FormulaModel,
    way: Way,
    undisturbed: dict[str, tuple[object, object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = way.engine(formula)
    executor = formula.executor(engine)
    with monkeypatch.context() as patch:
        launch = executor.launch

        def broken(*given: Any) -> LaunchedRun:
            launched: LaunchedRun = launch(*given)
            results = launched.results()
            sampled = replace(results.sampled, tokens=results.sampled.tokens - 1000)
            patch.setattr(launched, "results", lambda: results._replace(sampled=sampled))
            return launched

        patch.setattr(executor, "launch", broken)
        # No token is negative: the detokenizer notices, or the scheduler.
        with pytest.raises((OverflowError, StepError)):
            engine.step()
    assert answers(formula.finish(engine)) == undisturbed


def test_a_restart_empties_the_prefix_cache_under_a_step_launched_ahead(
    formula: FormulaModel,
) -> None:
    engine = formula.engine(async_scheduling=True, enable_prefix_caching=True, block_size=4)
    prompt: TokensPrompt = {"prompt_token_ids": list(range(12))}
    engine.add_request("a", prompt, GREEDY)
    engine.step()
    assert engine.stats.num_async_steps == 1
    (output,) = engine.restart()
    assert output.outputs[0].finish_reason == "error"
    engine.add_request("b", prompt, GREEDY)
    found = formula.finish(engine)["b"]
    assert found.num_cached_tokens == 0
    assert list(found.outputs[0].token_ids) == formula.greedy(range(12), 6)
    formula.check_idle(engine)


def test_requests_aborted_after_a_failure_leave_nothing(formula: FormulaModel, way: Way) -> None:
    engine = way.engine(formula)
    formula.executor(engine).before_sampling = FailOnce(2, RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        formula.finish(engine)
    assert len(engine.abort_request(NAMES)) == 4
    formula.check_idle(engine)


NUM_INTERRUPTS = 250


@contextmanager
def interrupted_at_random(
    armed: threading.Event, sent: threading.Event, seed: int
) -> Iterator[None]:
    """Send this process a SIGINT some time after each moment at which ``armed`` is set."""
    moments = random.Random(seed)
    is_over = threading.Event()

    def send() -> None:
        while armed.wait() and not is_over.is_set():
            armed.clear()
            time.sleep(moments.random() * 0.004)
            os.kill(os.getpid(), signal.SIGINT)
            sent.set()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        is_over.set()
        armed.set()
        sender.join()


def work(engine: LLMEngine, way: Way, outputs: list[list[RequestOutput]], last: int) -> None:
    """Keep five requests going, the newest called ``last``, and take down what comes.

    For a while: an interrupt that comes within a destructor is nobody's.
    """
    number = last
    for _ in range(200):
        if engine.get_num_unfinished_requests() < 5:
            number += 1
            prompt: TokensPrompt = {"prompt_token_ids": [number % 250, number // 250]}
            kind = list(RequestOutputKind)[number % 3]
            params = replace(way.params[number % len(way.params)], output_kind=kind)
            engine.add_request(str(number), prompt, params)
        # No interrupt can come between the end of step and the list: both are C.
        outputs.extend(map(operator.call, (engine.step,)))


def check_whole_state(engine: LLMEngine) -> None:
    """The engine and the scheduler know the same requests, and the core's invariants hold."""
    scheduler = engine.scheduler
    scheduler.check()
    groups = {request.group for request in engine._requests}
    known = {*scheduler.waiting, *scheduler.running, *scheduler.swapped}
    # A request that has ended keeps its group until a step that was launched ahead is done.
    assert groups == known or (groups < known and engine._loop._steps)
    for request in engine._requests:
        alive = [sequence.handle for sequence in request.sequences if sequence.finish is None]
        assert sorted(alive) == sorted(scheduler.seqs_of(request.group).tolist())


def joined(outputs: list[RequestOutput]) -> list[tuple[str, list[int], object, object]]:
    """What the outputs of one request say together, whatever their kind."""
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    ends: dict[int, tuple[object, object]] = {}
    is_delta = int(outputs[0].request_id) % 3 == RequestOutputKind.DELTA.value
    for output in outputs:
        for completion in output.outputs:
            before = (texts.get(completion.index, ""), tokens.get(completion.index, []))
            texts[completion.index] = before[0] + completion.text if is_delta else completion.text
            tokens[completion.index] = (
                before[1] + completion.token_ids if is_delta else completion.token_ids
            )
            ends[completion.index] = (completion.finish_reason, completion.stop_reason)
    return [(texts[index], tokens[index], *ends[index]) for index in sorted(texts)]


@pytest.mark.parametrize("name", WAYS)
def test_interrupts_at_random_moments_lose_nothing(formula: FormulaModel, name: str) -> None:
    way = WAYS[name]
    # An import that is interrupted leaves its file open, which is no concern of ours: so what a
    # step may import is there before.
    importlib.import_module("numpy.ma")
    for kind in RequestOutputKind:
        warming = formula.engine(**way.options)
        for number, params in enumerate(way.params):
            prompt: TokensPrompt = {"prompt_token_ids": [number, 1, 2]}
            warming.add_request(str(number), prompt, replace(params, output_kind=kind))
        formula.finish(warming)
    engine = formula.engine(**way.options)
    outputs: list[list[RequestOutput]] = []
    armed, sent = threading.Event(), threading.Event()
    num_interrupts = 0
    last = -1
    # The callbacks of the collector would swallow what is raised within them.
    with collector_paused(), interrupted_at_random(armed, sent, seed=len(name)):
        while num_interrupts < NUM_INTERRUPTS:
            try:
                sent.clear()
                armed.set()
                work(engine, way, outputs, last)
                sent.wait()
            except KeyboardInterrupt:
                num_interrupts += 1
            check_whole_state(engine)
            # Requests that were added: known to the engine, or by an output, fetched or not.
            known = [*engine._requests, *engine._loop.outputs, *itertools.chain(*outputs)]
            last = max((int(added.request_id) for added in known), default=-1)
    while engine.has_unfinished_requests():
        outputs.append(engine.step())
    formula.check_idle(engine)
    by_request: dict[str, list[RequestOutput]] = {}
    for output in (output for step in outputs for output in step):
        by_request.setdefault(output.request_id, []).append(output)
    assert sorted(map(int, by_request)) == list(range(last + 1))
    undisturbed = formula.engine()
    for number, given in sorted((int(request_id), both) for request_id, both in by_request.items()):
        params = replace(way.params[number % len(way.params)])
        prompt = {"prompt_token_ids": [number % 250, number // 250]}
        undisturbed.add_request(str(number), prompt, params)
        expected = formula.finish(undisturbed)[str(number)]
        both = [
            (
                completion.text,
                completion.token_ids,
                completion.finish_reason,
                completion.stop_reason,
            )
            for completion in expected.outputs
        ]
        assert joined(given) == both, f"request {number}"


def test_an_interrupt_that_keeps_another_from_rolling_back_loses_nothing(
    formula: FormulaModel, undisturbed: dict[str, tuple[object, object]], way: Way
) -> None:
    engine = way.engine(formula)
    formula.executor(engine).before_sampling = FailOnce(2, KeyboardInterrupt())
    outputs: dict[str, RequestOutput] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._loop, "_roll_back", FailOnce(0, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run(engine, outputs)
    outputs |= formula.finish(engine)
    assert answers(outputs) == undisturbed
    formula.check_idle(engine)


class NoText:
    """A detokenizer that fails, as a tokenizer of the user's own may."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class NoMoreText:
    """A text that fails with its next token."""

    text, num_tokens = "", 0

    def advanced(self, _: object) -> Any:
        raise RuntimeError("no more text")


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_tokenizer_that_fails_ends_its_own_request_alone(
    formula: FormulaModel, kind: RequestOutputKind, stop: tuple[str, ...]
) -> None:
    engine = formula.engine()
    params = replace(GREEDY, output_kind=kind, stop=stop)
    for name in ("good", "bad"):
        engine.add_request(name, {"prompt_token_ids": [1, 2]}, params)
    bad = engine._requests.by_id("bad")
    assert bad is not None
    bad.detokenizer = NoText()  # type: ignore[assignment]
    if bad.sequences[0].text is not None:
        bad.sequences[0].text = NoMoreText()  # type: ignore[assignment]
    outputs: dict[str, list[RequestOutput]] = {"good": [], "bad": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    formula.check_idle(engine)
    (completion,) = outputs["bad"][-1].outputs
    assert completion.finish_reason == "error"
    assert "no text can be made" in str(completion.stop_reason)
    tokens = [token for output in outputs["good"] for token in output.outputs[0].token_ids]
    assert tokens[-6:] == formula.greedy([1, 2], 6)

"""Steps launched before the tokens of the last are known: nobody can tell by the answers."""

from typing import Any

import pytest

from pagedserve import LLMEngine, RequestOutput, SamplingParams
from pagedserve.inputs import TokensPrompt
from pagedserve.sampling_params import RequestOutputKind

ASYNC: dict[str, Any] = {"async_scheduling": True}


def ids(*token_ids: int) -> TokensPrompt:
    return {"prompt_token_ids": list(token_ids)}


def greedy(num_tokens: int, **given: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **given)


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def run_rows(formula: Any, engine: LLMEngine) -> list[int]:
    """Run all requests; how many rows each step had."""
    formula.finish(engine)
    formula.check_idle(engine)
    rows: list[int] = formula.executor(engine).num_rows
    return rows


def test_it_is_off_on_the_cpu_unless_asked_for(formula: Any) -> None:
    for options, is_async in (({}, False), (ASYNC, True), ({"async_scheduling": False}, False)):
        engine = formula.engine(**options)
        engine.add_request("a", ids(1, 2), greedy(5))
        run_rows(formula, engine)
        assert (engine.stats.num_async_steps > 0) == is_async


def test_every_step_but_the_first_goes_ahead_and_the_last_is_not_run_twice(formula: Any) -> None:
    engine = formula.engine(**ASYNC)
    for name in "ab":
        engine.add_request(name, ids(1, 2), greedy(5))
    # Both are sure to end with their fifth token: no sixth step is launched.
    assert run_rows(formula, engine) == [2] * 5
    assert engine.stats.num_async_steps == 4


def test_a_sequence_that_ends_early_runs_once_more_and_its_answer_does_not_show_it(
    formula: Any,
) -> None:
    expected = formula.greedy([1, 2], 9)
    engine = formula.engine(**ASYNC)
    engine.add_request("stops", ids(1, 2), greedy(9, stop_token_ids=[expected[2]]))
    engine.add_request("goes on", ids(1, 2), greedy(6))
    last = formula.finish(engine)
    formula.check_idle(engine)
    assert tokens_of(last["stops"]) == expected[:3]
    assert last["stops"].outputs[0].finish_reason == "stop"
    assert tokens_of(last["goes on"]) == expected[:6]
    assert formula.executor(engine).num_rows == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    "wanted",
    [
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"n": 2, "temperature": 1.0, "seed": 1},
        {"n": 2, "best_of": 2, "use_beam_search": True},
        {"prompt_logprobs": 0, "max_tokens": 1},
        {"min_tokens": 6, "stop_token_ids": [3]},
    ],
)
def test_steps_wait_where_the_next_depends_on_the_tokens(
    formula: Any, wanted: dict[str, Any]
) -> None:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True} | wanted)
    answers = []
    for options in ({}, ASYNC):
        engine = formula.engine(**options)
        engine.add_request("a", ids(1, 2), params)
        last = formula.finish(engine)
        formula.check_idle(engine)
        answers.append(last["a"].outputs)
        assert engine.stats.num_async_steps == 0
    assert answers[0] == answers[1]


def test_an_abort_waits_for_the_step_under_way_and_frees_everything(formula: Any) -> None:
    engine = formula.engine(**ASYNC)
    engine.add_request("a", ids(1, 2), greedy(50))
    engine.add_request("b", ids(3, 4), greedy(50))
    engine.step()
    (aborted,) = engine.abort_request("a")
    # Two steps were launched, and both were taken.
    assert tokens_of(aborted) == formula.greedy([1, 2], 2)
    assert aborted.outputs[0].finish_reason == "abort"
    held_by_b = 1
    free = engine.memory.num_gpu_blocks - held_by_b
    assert engine.scheduler.num_free_gpu_blocks == free
    last = formula.finish(engine)
    assert tokens_of(last["b"]) == formula.greedy([3, 4], 50)
    formula.check_idle(engine)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_an_abort_returns_every_token_that_no_step_has_returned(
    formula: Any, kind: RequestOutputKind
) -> None:
    engine = formula.engine(**ASYNC)
    for name in "ab":
        engine.add_request(name, ids(1, 2), greedy(20, output_kind=kind))
    returned = [output for output in engine.step() if output.request_id == "a"]
    # The step launched ahead is processed by the first abort; its output waits for the next call.
    engine.abort_request("b")
    returned += engine.abort_request("a")
    if kind is not RequestOutputKind.DELTA:
        del returned[:-1]
    tokens = [token for output in returned for token in tokens_of(output)]
    assert tokens == formula.greedy([1, 2], 2)
    assert (returned[-1].finished, returned[-1].outputs[0].finish_reason) == (True, "abort")
    formula.check_idle(engine)


def test_an_abort_that_comes_with_the_last_token_gives_the_whole_answer(formula: Any) -> None:
    engine = formula.engine(**ASYNC)
    engine.add_request("a", ids(1, 2), greedy(2))
    engine.step()
    (ended,) = engine.abort_request("a")
    assert tokens_of(ended) == formula.greedy([1, 2], 2)
    assert ended.outputs[0].finish_reason == "length"
    formula.check_idle(engine)


def test_requests_that_come_while_a_step_is_under_way_join_the_next(formula: Any) -> None:
    engine = formula.engine(**ASYNC)
    last: dict[str, RequestOutput] = {}
    for number in range(12):
        engine.add_request(str(number), ids(number, 7), greedy(5))
        last |= {output.request_id: output for output in engine.step()}
    last |= formula.finish(engine)
    formula.check_idle(engine)
    for number in range(12):
        assert tokens_of(last[str(number)]) == formula.greedy([number, 7], 5)


def test_a_request_that_outgrows_the_cache_keeps_the_token_that_was_under_way(
    formula: Any,
) -> None:
    answers = []
    for options in ({}, ASYNC):
        engine = formula.engine(num_gpu_blocks=4, **options)
        engine.add_request("a", ids(1, 2, 3), greedy(40))
        last = formula.finish(engine)
        formula.check_idle(engine)
        answers.append(last["a"].outputs)
    assert answers[0][0].finish_reason == "ignored"
    assert answers[0] == answers[1]


def test_a_streamed_request_may_outgrow_the_cache_before_its_first_output(formula: Any) -> None:
    answers = []
    for options in ({}, ASYNC):
        engine = formula.engine(num_gpu_blocks=2, watermark=0.0, **options)
        engine.add_request("a", ids(*range(8)), greedy(5))
        answers.append([output.outputs for _ in range(2) for output in engine.step()])
        formula.check_idle(engine)
    assert [output.finish_reason for (output,) in answers[0]] == [None, "ignored"]
    assert answers[0] == answers[1]

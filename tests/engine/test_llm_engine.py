import gc
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedserve import (
    LLM,
    LLMEngine,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from pagedserve.collector import collector_paused
from pagedserve.engine.request import Request
from pagedserve.errors import ConcurrentCallError, ConfigError, EngineDeadError, InvariantError
from pagedserve.replay.__main__ import main as replay_main
from pagedserve.sampling_params import RequestOutputKind
from tests.support.tiny import save_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def ids(*token_ids: int) -> dict[str, Any]:
    return {"prompt_token_ids": list(token_ids)}


def test_requests_get_the_models_tokens(formula: Any) -> None:
    engine = formula.engine()
    prompts = {str(length): list(range(length)) for length in range(1, 20)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, ids(*prompt), GREEDY)
    outputs = formula.finish(engine)
    for request_id, prompt in prompts.items():
        output = outputs[request_id]
        assert output.outputs[0].token_ids == formula.greedy(prompt, 8)
        assert output.outputs[0].finish_reason == "length"
        assert (output.prompt, output.prompt_token_ids) == (None, prompt)
    formula.check_idle(engine)


def test_requests_that_have_ended_are_freed_without_a_collection(formula: Any) -> None:
    def num_requests() -> int:
        return sum(type(each) is Request for each in gc.get_objects())

    engine = formula.engine()
    gc.collect()
    num_before = num_requests()
    with collector_paused():
        engine.add_request("one", ids(1, 2), GREEDY)
        engine.add_request("two", ids(1, 2), replace(GREEDY, n=2, temperature=1.0))
        assert num_requests() == num_before + 2
        formula.finish(engine)
        assert num_requests() == num_before


def test_text_prompts_are_tokenised_and_kept(formula: Any) -> None:
    engine = formula.engine()
    engine.add_request("a", "ab", GREEDY)
    output = formula.finish(engine)["a"]
    assert output.prompt == "ab"
    assert output.prompt_token_ids == engine.tokenizer("ab").input_ids


def test_a_followed_request_has_an_output_each_step_and_one_last(formula: Any) -> None:
    engine = formula.engine()
    engine.add_request("followed", ids(1, 2), GREEDY)
    final = replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("final", ids(1, 2), final)
    seen: dict[str, list[RequestOutput]] = {"followed": [], "final": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output)
    assert [len(output.outputs[0].token_ids) for output in seen["followed"]] == list(range(1, 9))
    assert [output.finished for output in seen["followed"]] == [False] * 7 + [True]
    assert len(seen["final"]) == 1
    assert seen["final"][0].outputs == seen["followed"][-1].outputs


def test_preempted_requests_get_the_same_tokens(formula: Any) -> None:
    engine = formula.engine(num_gpu_blocks=24)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = {str(number): list(range(number, number + 10)) for number in range(8)}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, ids(*prompt), params)
    outputs = formula.finish(engine)
    assert engine.scheduler.num_preemptions > 0
    for request_id, prompt in prompts.items():
        assert outputs[request_id].outputs[0].token_ids == formula.greedy(prompt, 40)
    assert engine.stats.peak_used_blocks <= 24
    formula.check_idle(engine)


def test_stop_tokens_end_a_request(formula: Any) -> None:
    engine = formula.engine()
    expected = formula.greedy([5], 8)
    stop = expected[3]
    assert stop not in expected[:3]
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop])
    engine.add_request("a", ids(5), params)
    completion = formula.finish(engine)["a"].outputs[0]
    assert completion.token_ids == expected[:4]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stop_token_is_not_sampled_before_min_tokens(formula: Any) -> None:
    engine = formula.engine()
    stop = formula.greedy([5], 1)[0]
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=2, stop_token_ids=[stop])
    engine.add_request("a", ids(5), params)
    token_ids = formula.finish(engine)["a"].outputs[0].token_ids
    assert token_ids[0] == stop + 1
    assert formula.eos not in token_ids[:2]


def test_max_model_len_ends_a_request(formula: Any) -> None:
    engine = formula.engine(max_model_len=12)
    engine.add_request("a", ids(*range(7)), SamplingParams(temperature=0, max_tokens=100))
    completion = formula.finish(engine)["a"].outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


def test_a_request_that_outgrows_the_cache_is_ended_with_the_reason(formula: Any) -> None:
    engine = formula.engine(num_gpu_blocks=4)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine.add_request("large", ids(1, 2, 3), params)
    engine.add_request("small", ids(1), GREEDY)
    outputs = formula.finish(engine)
    completion = outputs["large"].outputs[0]
    assert completion.finish_reason == "ignored"
    assert "num_gpu_blocks" in str(completion.stop_reason)
    assert completion.token_ids == formula.greedy([1, 2, 3], len(completion.token_ids))
    assert outputs["small"].outputs[0].token_ids == formula.greedy([1], 8)
    formula.check_idle(engine)


def test_a_request_that_outgrows_the_cache_keeps_its_counts(formula: Any) -> None:
    engine = formula.engine(num_gpu_blocks=6)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for name in "abc":
        engine.add_request(name, ids(1, 2), params)
    seen: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    last = [output.metrics for output in seen if output.finished]
    assert all(output.outputs[0].finish_reason == "ignored" for output in seen if output.finished)
    assert sum(metrics.num_preemptions for metrics in last) == engine.scheduler.num_preemptions > 0
    assert (
        sum(metrics.num_recomputed_tokens for metrics in last)
        == engine.scheduler.num_recomputed_tokens
    )
    assert all(metrics.scheduler_time > 0 for metrics in last)
    formula.check_idle(engine)


def test_a_preemption_is_counted_when_it_happens(formula: Any) -> None:
    engine = formula.engine(num_gpu_blocks=12)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for name in "ab":
        engine.add_request(name, ids(*range(16)), params)
    counts: list[int] = []
    while engine.has_unfinished_requests():
        going = [output for output in engine.step() if not output.finished]
        counts += [output.metrics.num_preemptions for output in going]
    assert max(counts) == engine.scheduler.num_preemptions == 1


@pytest.mark.parametrize("params", [{"n": 1}, 5, "greedy"])
def test_what_are_no_sampling_parameters_is_refused(formula: Any, params: Any) -> None:
    engine = formula.engine()
    with pytest.raises(RequestError, match=r"sampling_params is .*; it must be one SamplingParams"):
        engine.add_request("a", ids(1), params)
    formula.check_idle(engine)


@pytest.mark.parametrize("request_id", [None, 5])
def test_what_is_no_id_cannot_be_aborted(formula: Any, request_id: Any) -> None:
    engine = formula.engine()
    with pytest.raises(RequestError, match=r"request_id is .*; it must be a string or a list"):
        engine.abort_request(request_id)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_aborting_frees_the_blocks_and_gives_what_was_there(formula: Any, num_steps: int) -> None:
    engine = formula.engine()
    engine.add_request("a", ids(1, 2), GREEDY)
    engine.add_request("b", ids(3), GREEDY)
    for _ in range(num_steps):
        engine.step()
    (aborted,) = engine.abort_request(["a", "no such request"])
    assert aborted.finished
    assert aborted.outputs[0].finish_reason == "abort"
    assert aborted.outputs[0].token_ids == formula.greedy([1, 2], num_steps)
    assert set(formula.finish(engine)) == {"b"}
    assert engine.abort_request("a") == []
    formula.check_idle(engine)


def test_a_request_id_can_be_used_again_only_after_its_end(formula: Any) -> None:
    engine = formula.engine()
    engine.add_request("a", ids(1), GREEDY)
    with pytest.raises(RequestError, match="request_id is 'a'"):
        engine.add_request("a", ids(1), GREEDY)
    formula.finish(engine)
    engine.add_request("a", ids(1), GREEDY)
    assert set(formula.finish(engine)) == {"a"}


def test_times_are_in_order(formula: Any) -> None:
    engine = formula.engine()
    engine.add_request("a", ids(1), GREEDY)
    metrics = formula.finish(engine)["a"].metrics
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    ]
    assert times == sorted(times)
    assert metrics.time_in_queue == times[1] - times[0]


def test_counts_add_up(formula: Any) -> None:
    engine = formula.engine()
    for number in range(3):
        engine.add_request(str(number), ids(1, 2, 3), GREEDY)
    formula.finish(engine)
    stats = engine.stats
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (9, 24)
    assert stats.num_steps == 8
    assert stats.peak_used_blocks == 3 * 3  # ten computed tokens each, in blocks of four


def test_a_step_is_one_line_at_debug_and_none_at_info(
    formula: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = formula.engine()
    for level, num_lines in ((logging.INFO, 0), (logging.DEBUG, 1)):
        caplog.clear()
        with caplog.at_level(level, "pagedserve"):
            engine.add_request("a", ids(1), SamplingParams(max_tokens=1, temperature=0))
            engine.step()
        assert len(caplog.records) == num_lines


def refuse(engine: LLMEngine, prompt: Any, params: SamplingParams = GREEDY) -> str:
    with pytest.raises(RequestError) as caught:
        engine.add_request("a", prompt, params)
    return str(caught.value)


def test_requests_that_can_never_run_are_refused(formula: Any) -> None:
    engine = formula.engine(num_gpu_blocks=4)
    assert "has 128 tokens; max_model_len is 128" in refuse(engine, ids(*([1] * 128)))
    text = refuse(engine, ids(*([1] * 17)))
    assert "17 tokens and needs 5 KV blocks of 4; the engine has 4" in text
    assert text.startswith("prompt is too long: 17 tokens > 16 maximum. ")
    stop = SamplingParams(stop_token_ids=[formula.vocab_size])
    assert "from 0 to 256" in refuse(engine, ids(1), stop)
    narrow = formula.engine(max_num_batched_tokens=40)
    assert "max_num_batched_tokens is 40" in refuse(narrow, ids(*([1] * 41)))
    for checked in (engine, narrow):
        formula.check_idle(checked)


def test_a_prompt_that_fills_all_usable_blocks_runs(formula: Any) -> None:
    engine = formula.engine(num_gpu_blocks=4)
    engine.add_request("a", ids(*([1] * 16)), SamplingParams(max_tokens=1, temperature=0))
    assert len(formula.finish(engine)["a"].outputs[0].token_ids) == 1


def test_a_scheduler_that_does_nothing_is_a_bug_not_a_hang(
    formula: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = formula.engine()
    engine.add_request("a", ids(1), GREEDY)
    idle = formula.engine().scheduler
    monkeypatch.setattr(engine._loop, "_scheduler", idle)
    with pytest.raises(InvariantError, match="nothing to do though 1 requests wait"):
        engine.step()


def test_an_engine_that_cannot_work_is_a_config_error(formula: Any) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 8, below max_num_seqs, 32"):
        formula.engine(max_num_batched_tokens=8)


def test_the_decisions_of_an_engine_can_be_replayed(formula: Any, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    engine = formula.engine(decision_log=str(log), num_gpu_blocks=12)
    for number in range(6):
        engine.add_request(str(number), ids(number, 1, 2), GREEDY)
    formula.finish(engine)
    engine.scheduler.flush_log()
    assert replay_main([str(log)]) == 0


def test_a_decision_log_that_cannot_be_written_is_named(formula: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        formula.engine(decision_log=str(tmp_path / "no folder" / "log"))


def test_a_beam_search_may_shrink_and_grow_again(tmp_path: Path) -> None:
    llm = LLM(str(save_tiny_llama(tmp_path)), num_gpu_blocks=256, block_size=8)
    # So common that some steps leave fewer beams than the search is wide.
    params = SamplingParams(
        n=4,
        use_beam_search=True,
        temperature=0,
        max_tokens=14,
        ignore_eos=True,
        stop=["7 w", "9 w", "3 w"],
    )
    prompts = [TokensPrompt(prompt_token_ids=[5 + number, 6, 7]) for number in range(12)]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.outputs == alone.outputs
    llm.llm_engine.scheduler.check()


def test_calls_of_two_threads_do_not_overlap(formula: Any) -> None:
    engine = formula.engine()
    engine.add_request("a", ids(1), GREEDY)
    in_step, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        in_step.set()
        goes_on.wait()

    formula.executor(engine).before_sampling = wait
    outputs: dict[str, Any] = {}
    other = threading.Thread(target=lambda: outputs.update(formula.finish(engine)))
    other.start()
    in_step.wait()
    for call in (
        engine.step,
        engine.reset_prefix_cache,
        engine.restart,
        engine.shutdown,
        lambda: engine.add_request("b", ids(1), GREEDY),
        lambda: engine.abort_request("a"),
        lambda: engine.end_failed(RuntimeError("no")),
    ):
        with pytest.raises(ConcurrentCallError, match="by another thread during a call"):
            call()
    goes_on.set()
    other.join()
    assert outputs["a"].outputs[0].token_ids == formula.greedy([1], 8)
    formula.check_idle(engine)


def test_shutdown_ends_requests_and_refuses_calls(formula: Any) -> None:
    with formula.engine(async_scheduling=True) as engine:
        for name in "ab":
            engine.add_request(name, ids(1, 2), GREEDY)
        engine.step()
    engine.shutdown()
    formula.check_idle(engine)
    for call in (engine.step, lambda: engine.add_request("c", ids(1), GREEDY)):
        with pytest.raises(EngineDeadError, match="shut down; make another"):
            call()

"""What vLLM's names ask for, obeyed by an engine."""

import logging
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from pagedserve import RequestError, RequestOutput, SamplingParams
from pagedserve.engine import llm_engine
from tests.support.formula import FormulaModel

PROMPT = list(b"a prompt of several blocks of four")


def run(formula: FormulaModel, engine: Any, prompt: Any, **params: Any) -> RequestOutput:
    engine.add_request("a", prompt, SamplingParams(**{"temperature": 0} | params))
    output: RequestOutput = formula.finish(engine)["a"]
    return output


def test_max_tokens_none_goes_on_to_the_models_length(formula: FormulaModel) -> None:
    output = run(formula, formula.engine(max_model_len=48), PROMPT, max_tokens=None)
    completion = output.outputs[0]
    assert len(completion.token_ids) == 48 - len(PROMPT)
    assert (completion.finish_reason, completion.finished()) == ("length", True)


def test_minus_one_is_the_whole_vocabulary(formula: FormulaModel) -> None:
    output = run(formula, formula.engine(), PROMPT, logprobs=-1, prompt_logprobs=-1, max_tokens=2)
    every = set(range(formula.vocab_size))
    assert all(set(entry) == every for entry in output.outputs[0].logprobs or ())
    assert output.prompt_logprobs is not None
    assert all(set(entry or ()) == every for entry in output.prompt_logprobs[1:])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_an_engine_may_limit_log_probabilities(formula: FormulaModel, name: str) -> None:
    engine = formula.engine(max_logprobs=5)
    run(formula, engine, PROMPT, **{name: 5})
    for number in (6, -1):
        with pytest.raises(RequestError, match=f"^{name} is .*; max_logprobs is 5"):
            run(formula, engine, PROMPT, **{name: number})
    formula.check_idle(engine)


def test_a_prompt_is_cut_to_what_leaves_room_for_a_token(formula: FormulaModel) -> None:
    output = run(
        formula, formula.engine(max_model_len=16), PROMPT, truncate_prompt_tokens=-1, max_tokens=5
    )
    assert output.prompt_token_ids == PROMPT[-15:]
    assert len(output.outputs[0].token_ids) == 1


def test_a_processor_may_see_the_prompt(formula: FormulaModel) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def watch(prompt: list[int], token_ids: list[int], logits: Any) -> Any:
        seen.append((prompt, token_ids))
        return logits

    output = run(formula, formula.engine(), PROMPT, logits_processors=[watch], max_tokens=3)
    tokens = output.outputs[0].token_ids
    assert tokens == formula.greedy(PROMPT, 3)
    assert seen == [(PROMPT, tokens[:count]) for count in range(3)]


def hits(formula: FormulaModel, salts: Sequence[str | None]) -> list[int]:
    """Tokens that prompts found in the prefix cache, one after the other."""
    engine, found = formula.engine(enable_prefix_caching=True), []
    for salt in salts:
        before = engine.scheduler.num_cached_tokens
        run(formula, engine, {"prompt_token_ids": PROMPT, "cache_salt": salt}, max_tokens=1)
        found.append(engine.scheduler.num_cached_tokens - before)
    return found


def test_prompts_of_other_salts_share_nothing(formula: FormulaModel) -> None:
    first, other, same, none, none_again = hits(formula, ["x", "y", "x", None, None])
    assert (first, other, none) == (0, 0, 0)
    assert same == none_again > 0


@pytest.mark.parametrize("priorities", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_lowest_number_is_served_first(
    formula: FormulaModel, priorities: tuple[int, ...]
) -> None:
    engine = formula.engine(scheduling_policy="priority", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=2)
    for index, priority in enumerate(priorities):
        engine.add_request(str(index), PROMPT, params, priority=priority)
    ended: list[str] = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == sorted(ended, key=lambda name: priorities[int(name)])


def test_an_engine_has_the_classic_names(formula: FormulaModel) -> None:
    engine = formula.engine()
    arrived = time.time() - 5
    engine.add_request("a", {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=2), arrived)
    assert engine.get_num_unfinished_requests() == 1
    assert engine.has_unfinished_requests()
    assert engine.get_tokenizer() is engine.tokenizer
    assert engine.get_model_config().vocab_size == formula.vocab_size
    engine.do_log_stats()
    with pytest.raises(RequestError, match="not supported yet: prompt_adapter_request='x'"):
        engine.add_request("b", PROMPT, SamplingParams(), prompt_adapter_request=cast(Any, "x"))
    engine.add_request("b", PROMPT, SamplingParams(), lora_request=None, trace_headers=None)
    assert len(engine.abort_request("b")) == 1
    metrics = formula.finish(engine)["a"].metrics
    assert metrics.arrival_time == arrived
    assert (metrics.time_in_queue or 0) >= 5
    assert arrived + 5 <= (metrics.first_token_time or 0) <= (metrics.last_token_time or 0)
    assert (metrics.finished_time or 0) <= time.time()


@pytest.mark.parametrize("disable_log_stats", [False, True])
def test_the_line_in_the_log_can_be_left_out(
    formula: FormulaModel,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    disable_log_stats: bool,
) -> None:
    monkeypatch.setattr(llm_engine, "_STATS_INTERVAL", 0)
    engine = formula.engine(disable_log_stats=disable_log_stats)
    with caplog.at_level(logging.INFO, "pagedserve"):
        run(formula, engine, PROMPT, max_tokens=3)
    assert ("generation" in caplog.text) is not disable_log_stats

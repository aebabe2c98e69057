"""Times and counts of requests, and the line about the whole engine."""

import re
from typing import Any

import pytest

from pagedserve import SamplingParams
from pagedserve.engine.stats import EngineSnapshot, StatsLine
from pagedserve.host_ops.threads import ThreadWaits
from pagedserve.inputs import TokensPrompt


def prompt(num_tokens: int, *, first: int = 0) -> TokensPrompt:
    return {"prompt_token_ids": list(range(first, first + num_tokens))}


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_metrics_tell_of_preemptions(formula: Any, mode: str) -> None:
    # Host memory for all: else some that should be swapped are recomputed.
    engine = formula.engine(num_gpu_blocks=24, preemption_mode=mode, swap_space=0.01)
    for number in range(8):
        engine.add_request(str(number), prompt(10, first=number), greedy(40))
    told = [output.metrics for output in formula.finish(engine).values()]
    assert sum(metrics.num_preemptions for metrics in told) == engine.scheduler.num_preemptions > 0
    for metrics in told:
        recomputes = metrics.num_preemptions > 0 and mode == "recompute"
        assert (metrics.num_recomputed_tokens > 0) == recomputes
        assert metrics.scheduler_time > 0
        times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time]
        assert [*times, metrics.finished_time] == sorted([*times, metrics.finished_time])
    assert any(metrics.num_preemptions == 0 for metrics in told)
    formula.check_idle(engine)


def test_metrics_without_preemptions(formula: Any) -> None:
    engine = formula.engine()
    engine.add_request("a", prompt(2), SamplingParams(n=4, seed=11, max_tokens=8))
    metrics = formula.finish(engine)["a"].metrics
    assert (metrics.num_preemptions, metrics.num_recomputed_tokens) == (0, 0)
    assert metrics.scheduler_time > 0


def test_the_line_of_statistics_has_the_figures(formula: Any) -> None:
    engine = formula.engine(max_num_seqs=2, enable_prefix_caching=True)
    for number in range(3):
        engine.add_request(str(number), prompt(8), greedy(8))
    rates = StatsLine()
    engine.step()
    line = engine.stats_line(rates)
    assert "running 2, waiting 1, swapped 0" in line
    used = 1 - engine.scheduler.num_free_gpu_blocks / 64
    assert f"KV cache {used:.1%}" in line
    assert "prefix hits" in line
    found = re.search(r"prompt ([\d.]+), generation ([\d.]+) tokens/s$", line)
    assert found is not None
    assert all(float(rate) > 0 for rate in found.groups())
    formula.finish(engine)
    engine.stats_line(rates)
    assert "running 0, waiting 0, swapped 0" in engine.stats_line(rates)
    assert "prompt 0.0, generation 0.0 tokens/s" in engine.stats_line(rates)


def test_several_engines_are_counted_as_one(formula: Any) -> None:
    engines = [formula.engine(), formula.engine()]
    for number, engine in enumerate(engines):
        for name in range(number + 2):
            engine.add_request(str(name), prompt(4), greedy(3 + number))
        engine.step()
    first, second = (engine.snapshot() for engine in engines)
    both = EngineSnapshot.total({"a": first, "b": second})
    assert (both.num_running, both.num_waiting) == (5, 0)
    assert both.gpu_cache_usage == (first.gpu_cache_usage + second.gpu_cache_usage) / 2
    assert both.stats.num_prompt_tokens == 5 * 4
    assert both.stats.step_tokens.total == 5 * 4 + 5
    assert sum(both.stats.step_tokens.counts) == 2
    assert both.replicas == {"a": first, "b": second}
    assert both.threads == ThreadWaits.total([first.threads, second.threads])
    left = EngineSnapshot.total({"b": second}, [first])
    assert (left.num_running, left.gpu_cache_usage) == (3, second.gpu_cache_usage)
    assert left.stats == both.stats
    nothing = EngineSnapshot.total({})
    assert (nothing.num_running, nothing.stats.num_steps) == (0, 0)
    assert first.stats.num_steps == second.stats.num_steps == 1, "they are as they were"

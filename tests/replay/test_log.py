"""Decision logs: written by a scheduler that is driven at random, and run again."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pagedserve import CacheConfig, Scheduler, SchedulerConfig
from pagedserve.replay.driver import ScenarioDriver
from pagedserve.replay.log import replay_log
from pagedserve.replay.scenario import Scenario, ScenarioError
from tests.support.random_lives import (
    CONFIGURATIONS,
    DECISIONS,
    NUM_STEPS,
    RandomEngine,
)

Configs = Callable[..., tuple[SchedulerConfig, CacheConfig]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("options", CONFIGURATIONS)
@pytest.mark.parametrize("seed", range(5))
def test_a_random_life_is_run_again_to_the_same_decisions(
    options: str, seed: int, log: Path
) -> None:
    engine = RandomEngine(options, seed, log)
    engine.run()
    assert replay_log(log) == (NUM_STEPS + 1, None, False)
    header, *lines = lines_of(log)
    num_groups = len(header["cache"]["groups"])
    nothing = {"group_moves": [[0, 0, 0]] * num_groups, "adapters_to_load": []}
    lines = [nothing | line for line in lines]
    written = [{key: line[key] for key in ("step", *DECISIONS)} for line in lines]
    assert written[:-1] == engine.seen


@pytest.mark.parametrize("name", ["windows", "states"])
def test_a_log_of_the_format_before_is_run_again_to_the_same_decisions(name: str) -> None:
    """Random lives with encoders, and with a window and cached prefixes, or with states."""
    log = Path(__file__).parent / "older" / f"{name}.log.gz"
    assert replay_log(log) == (NUM_STEPS + 1, None, False)


def test_the_random_lives_hold_what_they_are_to_show(log: Path) -> None:
    kinds: set[str] = set()
    found: dict[str, set[str]] = {"preempted": set(), "ignored": set(), "refused": set()}
    for options, seed in product(CONFIGURATIONS, range(3)):
        RandomEngine(options, seed, log).run()
        for line in lines_of(log)[1:]:
            kinds |= {event[0] for event in line["events"]}
            kinds |= {"several tokens" for event in line["events"] if has_several_tokens(event)}
            for key, reasons in found.items():
                reasons |= {reason for _, reason in line[key]}
    events = {"add", "abort", "update", "update_async", "resolve_tokens", "abandon"}
    assert kinds == events | {"several tokens", "reset_prefix_cache"}
    assert found["preempted"] == {"recompute", "swap"}
    reasons = {"no_blocks", "no_tokens", "no_sequences", "no_adapter_slot", "delayed"}
    assert found["refused"] == reasons
    assert any("the prompt has 110 tokens" in reason for reason in found["ignored"])


def has_several_tokens(event: list[Any]) -> bool:
    return event[0] == "update" and len(event) > 3 and len(event[1]) > len(event[3])


def test_recorded_scenarios_are_run_again(
    scenario_name: str, load: Callable[[str], Scenario], configs: Configs, log: Path
) -> None:
    scenario = load(scenario_name)
    driver = ScenarioDriver(scenario)
    driver.scheduler = Scheduler(*configs(scenario.config, {}, {}), log=log)
    num_steps = len(list(driver.rows())) - 1
    driver.scheduler.flush_log()
    assert replay_log(log) == (num_steps, None, False)


@pytest.mark.parametrize("key", DECISIONS)
def test_the_first_edited_decision_is_reported(key: str, log: Path) -> None:
    RandomEngine("swap", 1, log).run()
    lines = lines_of(log)
    for line in lines[40:45]:
        line[key] = [*line.get(key, []), "edited"]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    num_same, difference, _ = replay_log(log)
    assert num_same == 39
    assert difference is not None
    assert difference.startswith(f"step {lines[40]['step']}, {key}: ")
    assert difference.endswith("'edited'] in the log")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (["abort", 77], "77"),
        (["update", [1], []], "no step is open"),
        (["add", {"group": 5, "token_ids": [], "arrival_time": 0.0}], "prompt is empty"),
        (["add", {"group": 5, "token_ids": [1], "arrival_time": 0.0}], "group 5"),
    ],
)
def test_an_event_that_cannot_be_is_reported_as_a_difference(
    event: list[Any], message: str, log: Path
) -> None:
    RandomEngine("default", 2, log).run()
    lines = lines_of(log)
    lines[30]["events"].append(event)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    num_same, difference, _ = replay_log(log)
    assert num_same == 29
    assert difference is not None
    assert difference.startswith(f"step {lines[30]['step']}, events: ")
    assert message in difference


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.pop("now"),
        lambda line: line.pop("free"),
        lambda line: line.update(events=[["pause"]]),
        lambda line: line.update(events=[[]]),
        lambda line: line.update(events=7),
        lambda line: line.update(events=[["add", 7]]),
        lambda line: line.update(events=[["add", {"group": 5, "token_ids": [1], "speed": 1}]]),
        lambda line: line.update(now="soon"),
    ],
)
def test_a_line_of_another_format_is_refused_by_its_number(
    change: Callable[[dict[str, Any]], object], log: Path
) -> None:
    RandomEngine("default", 2, log).run()
    lines = lines_of(log)
    change(lines[12])
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ScenarioError, match="line 13 is not a step"):
        replay_log(log)


def test_a_last_line_cut_short_is_passed_over(log: Path) -> None:
    RandomEngine("cached", 3, log).run()
    text = log.read_text()
    start = text.rindex("\n", 0, -1) + 1
    for end in (start, start + 1, (start + len(text)) // 2, len(text) - 2):
        log.write_text(text[:end])
        assert replay_log(log) == (NUM_STEPS, None, end > start)
    log.write_text(text[:-1])  # all but the line's end
    assert replay_log(log) == (NUM_STEPS + 1, None, False)


def test_a_line_cut_short_in_the_middle_is_refused(log: Path) -> None:
    RandomEngine("cached", 3, log).run()
    lines = log.read_text().splitlines()
    lines[20] = lines[20][:-5]
    log.write_text("\n".join(lines))
    with pytest.raises(ScenarioError, match="line 21 is not JSON"):
        replay_log(log)


def test_a_log_is_whole_when_its_scheduler_is_gone(log: Path) -> None:
    engine = RandomEngine("default", 0, log)
    engine.live()
    num_bytes = log.stat().st_size
    del engine
    assert log.stat().st_size > num_bytes, "the rest was in memory"
    assert replay_log(log) == (NUM_STEPS + 1, None, False)


def test_a_log_where_none_can_be_is_refused_with_its_path(tmp_path: Path) -> None:
    configs = (
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32),
        CacheConfig(block_size=4, num_gpu_blocks=8),
    )
    (tmp_path / "file").touch()
    for path in (tmp_path / "no such folder" / "log", tmp_path / "file" / "log"):
        with pytest.raises(OSError, match=str(path)):
            Scheduler(*configs, log=path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_log_and_not_the_scheduler() -> None:
    engine = RandomEngine("default", 0, Path("/dev/full"))
    engine.scheduler.flush_log()
    error = engine.scheduler.log_error
    assert error is not None
    assert "No space left on device" in error
    engine.live()
    assert engine.scheduler.log_error == error
    assert len(engine.seen) == NUM_STEPS
    engine.scheduler.check()


def test_without_a_log_there_is_no_error_and_nothing_to_flush() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32),
        CacheConfig(block_size=4, num_gpu_blocks=8),
    )
    scheduler.flush_log()
    assert scheduler.log_error is None

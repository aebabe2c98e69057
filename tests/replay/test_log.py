"""Decision logs: written by a scheduler that is driven at random, and run again."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedserve import CacheConfig, InputBuffers, Scheduler, SchedulerConfig, SchedulerOutputs
from pagedserve._core import CacheChoices, SchedulerChoices
from pagedserve.replay.driver import ScenarioDriver
from pagedserve.replay.log import replay_log
from pagedserve.replay.scenario import Scenario, ScenarioError

Configs = Callable[..., tuple[SchedulerConfig, CacheConfig]]

MAX_ROWS, MAX_TOKENS, MAX_MODEL_LEN, BLOCK_SIZE = 12, 64, 96, 4
NUM_STEPS = 150

CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "chunked": ({"enable_chunked_prefill": True, "max_num_bypasses": 3}, {"num_cpu_blocks": 30}),
    "cached": ({}, {"enable_prefix_caching": True}),
    "cached in chunks": ({"enable_chunked_prefill": True}, {"enable_prefix_caching": True}),
    "ahead": ({"num_lookahead_slots": 3}, {"num_cpu_blocks": 20}),
    "ahead and cached": ({"num_lookahead_slots": 5}, {"enable_prefix_caching": True}),
    "priority": ({"policy": "priority", "victim_policy": "least_work"}, {"num_cpu_blocks": 9}),
    "adapters": ({"max_loras": 2, "delay_factor": 8.0}, {"enable_prefix_caching": True}),
    "swap": ({"preemption_mode": "swap", "max_num_bypasses": 2}, {"num_cpu_blocks": 60}),
    "recompute": ({"preemption_mode": "recompute"}, {}),
    "as vLLM": (
        {"choices": SchedulerChoices.classic(), "enable_chunked_prefill": True},
        {"choices": CacheChoices.classic(), "enable_prefix_caching": True, "num_cpu_blocks": 30},
    ),
    "window": ({}, {"sliding_window": 10, "num_cpu_blocks": 30}),
    "states": ({"num_state_slots": 12, "num_cpu_state_slots": 5}, {"num_cpu_blocks": 30}),
}

# What a line says of its step.
DECISIONS = (
    "scheduled",
    "preempted",
    "swapped_in",
    "moves",
    "state_moves",
    "adapters_to_load",
    "ignored",
    "refused",
    "free",
)


def decisions(scheduler: Scheduler, step: SchedulerOutputs) -> dict[str, Any]:
    """What the line of a step has to say of it."""
    moves = (step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy)
    state_moves = (step.states_to_swap_out, step.states_to_swap_in, step.states_to_copy)
    return {
        "step": step.step_id,
        "scheduled": [
            [entry.group, entry.token_chunk_size, entry.is_prefill, entry.num_rows]
            for entry in step.scheduled_seq_groups
        ],
        "preempted": [list(pair) for pair in step.preempted],
        "swapped_in": step.swapped_in,
        "moves": [len(pairs) for pairs in moves],
        "state_moves": [len(pairs) for pairs in state_moves],
        "adapters_to_load": [list(load) for load in step.adapters_to_load],
        "ignored": [[group, reason] for group, reason, _ in step.ignored_seq_groups],
        "refused": [list(pair) for pair in step.refused],
        "free": [scheduler.num_free_gpu_blocks, scheduler.num_free_cpu_blocks],
    }


class RandomEngine:
    """Does whatever an engine may do, in an order that follows from a seed."""

    def __init__(self, options: str, seed: int, log: Path, **log_options: int) -> None:
        for_scheduler, for_cache = CONFIGURATIONS[options]
        self.rng = random.Random(f"{options} {seed}")
        self.config = SchedulerConfig(
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            **for_scheduler,
        )
        cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=40, **for_cache)
        self.scheduler = Scheduler(self.config, cache, log=log, **log_options)
        self.row_handles = np.zeros(MAX_ROWS, np.int64)
        of_rows = ("seq_lens", "sample_index", "sample_rows", "adapter_slots", "state_slots")
        self.buffers = InputBuffers(
            token_ids=np.zeros(MAX_TOKENS, np.int32),
            positions=np.zeros(MAX_TOKENS, np.int64),
            slot_mapping=np.zeros(MAX_TOKENS, np.int64),
            query_start=np.zeros(MAX_ROWS + 1, np.int32),
            block_tables=np.zeros(MAX_ROWS * MAX_MODEL_LEN, np.int32),
            row_handles=self.row_handles,
            **{name: np.zeros(MAX_ROWS, np.int32) for name in of_rows},
        )
        # Of each group how many sequences it asked for, and how many were ever made.
        self.asked: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.seen: list[dict[str, Any]] = []
        # The step that was ended before its tokens were known.
        self.unresolved: SchedulerOutputs | None = None
        self.now = 0.0

    def run(self) -> None:
        self.live()
        self.scheduler.flush_log()
        assert self.scheduler.log_error is None

    def live(self) -> None:
        for _ in range(NUM_STEPS):
            while self.rng.random() < 0.4:
                self.add()
            self.maybe_abort()
            if self.rng.random() < 0.05:
                self.scheduler.reset_prefix_cache()
            self.now += self.rng.choice([0.0, 0.01, 1 / 3])
            step = self.scheduler.schedule(self.now)
            self.seen.append(decisions(self.scheduler, step))
            if self.resolve() and not step.is_empty:
                self.finish(step)
            self.scheduler.check()
        self.scheduler.schedule(self.now)  # writes down what was done since the last step

    def add(self) -> None:
        rng = self.rng
        # Few first tokens, so that prefixes are met again; now and then too long a prompt.
        length = rng.choice([1, 5, 20, 30, 63, 64, 110 if rng.random() < 0.1 else 8])
        token_ids = np.arange(length, dtype=np.int32) + rng.randrange(3)
        asked = rng.choice([1, 1, 1, 2, 4])
        salt = rng.choice([0, 0, 0, 2**64 - 1])
        group, _ = self.scheduler.add_seq_group(
            token_ids,
            arrival_time=self.now - rng.random() / 20,
            max_num_running_seqs=asked,
            priority=rng.randrange(-2, 3),
            adapter=rng.randrange(4) if self.config.max_loras else 0,
            salt=salt,
            num_encoder_tokens=rng.choice([0, 9]) if salt else 0,
        )
        self.asked[group], self.made[group] = asked, 1

    def maybe_abort(self) -> None:
        if self.asked and self.rng.random() < 0.1:
            self.scheduler.abort(self.rng.choice(list(self.asked)))

    def resolve(self) -> bool:
        """Name the tokens of the unresolved step; False if it failed, and with it the next."""
        step, self.unresolved = self.unresolved, None
        if step is None:
            return True
        if self.rng.random() < 0.1:
            self.scheduler.abandon(step.step_id)
            return False
        tokens = [self.rng.randrange(5) for _ in range(step.num_samples)]
        self.scheduler.resolve_tokens(step.step_id, np.array(tokens, np.int32))
        return True

    def finish(self, step: SchedulerOutputs) -> None:
        self.maybe_abort()
        if self.rng.random() < 0.5 and self.scheduler.update_async(step.step_id):
            self.unresolved = step
            return
        if self.rng.random() < 0.05:
            self.scheduler.abandon(step.step_id)
            return
        self.scheduler.prepare_inputs(self.buffers)
        parents, starts, tokens, finish = [], [0], [], []
        for parent, own_tokens, is_finished in self.outputs(step):
            parents.append(parent)
            tokens.extend(own_tokens)
            starts.append(len(tokens))
            finish.append(is_finished)
        self.scheduler.update(
            step.step_id,
            np.array(parents, np.int32),
            np.array(starts, np.int32),
            np.array(tokens, np.int32),
            np.array(finish, np.uint8),
        )

    def outputs(self, step: SchedulerOutputs) -> Iterator[tuple[int, list[int], bool]]:
        row = 0
        for entry in step.scheduled_seq_groups:
            if entry.is_sampled:
                limit = self.asked[entry.group]
                if self.made[entry.group] >= limit:
                    limit = len(self.scheduler.seqs_of(entry.group))
                for own_row in range(row, row + entry.num_rows):
                    for output in self.outputs_of(own_row, step, limit):
                        limit -= not output[2]
                        yield output
            row += entry.num_rows

    def outputs_of(
        self, row: int, step: SchedulerOutputs, limit: int
    ) -> Iterator[tuple[int, list[int], bool]]:
        rng, seq = self.rng, int(self.row_handles[row])
        group = next(handle for handle in self.asked if self.holds(handle, seq))
        num_outputs = rng.choices([0, 1, 2, 3], [1, 20, 3, 1])[0]
        self.made[group] += max(0, num_outputs - 1)
        num_tokens = 1
        if num_outputs == 1 and row >= step.num_prefill_rows:
            num_tokens = rng.randint(1, 1 + step.num_lookahead_slots)
        is_long = len(self.scheduler.token_ids(seq)) + num_tokens > MAX_MODEL_LEN
        for _ in range(num_outputs):
            is_finished = is_long or limit <= 0 or rng.random() < 0.05
            limit -= not is_finished
            yield row, [rng.randrange(5) for _ in range(num_tokens)], is_finished

    def holds(self, group: int, seq: int) -> bool:
        try:
            return seq in self.scheduler.seqs_of(group).tolist()
        except LookupError:
            return False


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
    nothing = {"state_moves": [0, 0, 0], "adapters_to_load": []}
    lines = [nothing | line for line in lines_of(log)[1:]]
    written = [{key: line[key] for key in ("step", *DECISIONS)} for line in lines]
    assert written[:-1] == engine.seen


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

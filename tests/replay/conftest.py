"""Scenarios run on a scheduler that is watched at every call."""

import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pagedserve import CacheConfig, GroupStats, Scheduler, SchedulerConfig, SchedulerOutputs
from pagedserve.replay.driver import Row, ScenarioDriver
from pagedserve.replay.scenario import Scenario, ScenarioConfig, load_scenario

GOLDEN = Path(__file__).parents[1] / "golden"
MAX_STEPS = 20_000
# A step may be spent on giving blocks back alone; several in a row may not.
MAX_STEPS_WITHOUT_ROWS = 1


class Watched:
    """A scheduler whose whole state is checked after every call, and whose steps are judged."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_without_rows = 0
        self.reasons: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def add_seq_group(self, *args: Any, **options: Any) -> tuple[int, int]:
        added = self._scheduler.add_seq_group(*args, **options)
        self._scheduler.check()
        return added

    def abort(self, group: int) -> GroupStats | None:
        stats = self._scheduler.abort(group)
        self._scheduler.check()
        return stats

    def schedule(self, now: float) -> SchedulerOutputs:
        outputs = self._scheduler.schedule(now)
        self._scheduler.check()
        self._judge_order(outputs)
        self._judge_progress(outputs)
        self.reasons |= {group: reason for group, reason, _ in outputs.ignored_seq_groups}
        return outputs

    def update(self, *args: Any) -> Any:
        updated = self._scheduler.update(*args)
        self._scheduler.check()
        return updated

    @staticmethod
    def _judge_order(outputs: SchedulerOutputs) -> None:
        groups = outputs.scheduled_seq_groups
        kinds = [entry.is_prefill for entry in groups]
        assert kinds == sorted(kinds, reverse=True), "prefills first"
        assert outputs.num_prefill_groups == sum(kinds)
        assert all(entry.token_chunk_size == 1 for entry in groups if not entry.is_prefill)
        preempted = [group for group, _ in outputs.preempted]
        assert len(preempted) == len(set(preempted)), "one group preempted twice"
        assert not {entry.group for entry in groups} & set(preempted), "a preempted group runs"
        copies = outputs.blocks_to_copy
        assert not (copies[:, 0] == copies[:, 1]).any(), "a block copied onto itself"

    def _judge_progress(self, outputs: SchedulerOutputs) -> None:
        done = outputs.scheduled_seq_groups or outputs.preempted or outputs.ignored_seq_groups
        assert done or not self._scheduler.has_unfinished, "work waits and nothing is done"
        self._num_without_rows += 1
        if outputs.num_rows or not self._scheduler.has_unfinished:
            self._num_without_rows = 0
        assert self._num_without_rows <= MAX_STEPS_WITHOUT_ROWS, "work waits and nothing runs"


class Run(NamedTuple):
    """A run to its end; reasons by the names of the requests that were ended."""

    rows: list[Row]
    reasons: dict[str, str]


def run_watched(scenario: Scenario, scheduler: Scheduler | None = None) -> Run:
    """Run to the end; every request has finished, was aborted or was ended with a reason."""
    driver = ScenarioDriver(scenario)
    watched: Any = Watched(scheduler or driver.scheduler)
    driver.scheduler = watched
    rows = list(islice(driver.rows(), MAX_STEPS))
    assert "end" in rows[-1], f"not done after {MAX_STEPS} steps"
    reasons = {driver._ids[group]: reason for group, reason in watched.reasons.items()}
    _assert_all_ended(scenario, rows, reasons)
    return Run(rows, reasons)


def _assert_all_ended(scenario: Scenario, rows: list[Row], reasons: dict[str, str]) -> None:
    *steps, last = rows
    end = last["end"]
    assert end["end"] == "done"
    assert end["left"] == [[], [], []]
    assert end["free"] == [scenario.config.num_gpu_blocks, scenario.config.num_cpu_blocks]
    finished = [request for row in steps for request in row["finished"]]
    assert len(finished) == len(set(finished))
    assert {request for row in steps for request in row["ignored"]} == set(reasons)
    assert all(reasons.values())
    aborted = {request for requests in scenario.aborts.values() for request in requests}
    requests = {request.id for request in scenario.requests}
    assert {*finished, *reasons} <= requests <= {*finished, *reasons, *aborted}
    assert not set(finished) & set(reasons)


def configs_within(
    config: ScenarioConfig, scheduler_options: dict[str, Any], cache_options: dict[str, Any]
) -> tuple[SchedulerConfig, CacheConfig]:
    """Configurations with the limits of a scenario, but for the options our own defaults."""
    values = asdict(config)
    of_cache = {key: values.pop(key) for key in values.copy() if hasattr(CacheConfig, key)}
    return SchedulerConfig(**(values | scheduler_options)), CacheConfig(
        **(of_cache | cache_options)
    )


@pytest.fixture(scope="session")
def configs() -> Callable[..., tuple[SchedulerConfig, CacheConfig]]:
    return configs_within


@pytest.fixture(scope="session")
def run() -> Callable[..., Run]:
    return run_watched


@pytest.fixture(scope="session")
def golden_file() -> Callable[[str, str], Path]:
    """The scenario or golden file of a name, gzipped or not."""

    def find(name: str, kind: str) -> Path:
        (path,) = GOLDEN.glob(f"{name}.{kind}.json*")
        return path

    return find


@pytest.fixture(scope="session")
def load(golden_file: Callable[[str, str], Path]) -> Callable[[str], Scenario]:
    return lambda name: load_scenario(golden_file(name, "scenario"))


@pytest.fixture(scope="session")
def raw(golden_file: Callable[[str, str], Path]) -> Callable[[str], dict[str, Any]]:
    """A scenario as it stands in its file."""

    def read(name: str) -> dict[str, Any]:
        path = golden_file(name, "scenario")
        data = path.read_bytes()
        found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        return found

    return read


# Which scenarios a test gets that takes one under this name.
KINDS_BY_FIXTURE = {
    "scenario_name": {"reference", "order", "fault"},
    "recorded": {"reference", "order"},
    "faulty": {"fault"},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    with (GOLDEN / "scenarios.csv").open(encoding="utf-8", newline="") as file:
        scenarios = list(csv.DictReader(file))
    for fixture in KINDS_BY_FIXTURE.keys() & set(metafunc.fixturenames):
        kinds = KINDS_BY_FIXTURE[fixture]
        names = [scenario["name"] for scenario in scenarios if scenario["kind"] in kinds]
        metafunc.parametrize(fixture, names)

"""The recorded scenarios: the same decisions where those were right, a good end where not.

All runs are watched: ``conftest.py`` checks the whole state after every call, that prefills come
first, that no block is copied onto itself, and that work which waits makes progress.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedserve import CacheConfig, Scheduler, SchedulerChoices, SchedulerConfig
from pagedserve.replay.compare import first_difference, load_golden
from pagedserve.replay.scenario import Scenario, load_scenario
from tests.support.examples import examples

FindFile = Callable[[str, str], Path]
Load = Callable[[str], Scenario]
Run = Callable[..., Any]
Mutate = Callable[[str, int], Scenario]
Configs = Callable[..., tuple[SchedulerConfig, CacheConfig]]

NUM_MUTATIONS = examples(1, all_of_them=3)

# Options beside the defaults: of the scheduler and of the cache.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "bypass": ({"max_num_bypasses": 5, "victim_policy": "least_work"}, {}),
    "cached": ({}, {"enable_prefix_caching": True}),
    "ahead": (
        {"num_lookahead_slots": 5, "choices": SchedulerChoices(admit_after_preemption=True)},
        {},
    ),
    "priority": ({"policy": "priority"}, {"enable_prefix_caching": True}),
    "chunked": ({"enable_chunked_prefill": True, "max_num_bypasses": 3}, {}),
}


def mutated(data: dict[str, Any], seed: int) -> dict[str, Any]:
    """The scenario with other tokens, other lengths and other times, of the same kind."""
    rng = random.Random(f"{data['name']} {seed}")
    shift = rng.randrange(1, 1_000_000)
    for request in data["requests"]:
        delay = rng.randrange(3)
        request["step"] += delay
        request["arrival_time"] += delay * 0.01
        request["out_seed"] += shift
        stretch = rng.uniform(0.6, 1.4)
        request["output_lens"] = [max(1, int(n * stretch)) for n in request["output_lens"]]
        for segment in request["prompt"]:
            for key in {"seed", "out_seed"} & segment.keys():
                segment[key] += shift
            if "seed" in segment and rng.random() < 0.5:
                segment["len"] = max(1, int(segment["len"] * stretch))
    return data


@pytest.fixture
def mutate(raw: Callable[[str], dict[str, Any]], tmp_path: Path) -> Mutate:
    def changed(name: str, seed: int) -> Scenario:
        path = tmp_path / "scenario.json"
        path.write_text(json.dumps(mutated(raw(name), seed)))
        return load_scenario(path)

    return changed


def test_every_scenario_is_listed_once(golden_file: FindFile) -> None:
    folder = golden_file("v062-01-classic-basic", "scenario").parent
    listed = [line.split(",")[0] for line in (folder / "scenarios.csv").read_text().splitlines()]
    for kind in ("scenario", "golden"):
        there = sorted(path.name.split(f".{kind}.")[0] for path in folder.glob(f"*.{kind}.json*"))
        assert there == sorted(listed[1:])


def test_decisions_are_the_recorded_ones(
    recorded: str, load: Load, golden_file: FindFile, run: Run
) -> None:
    scenario = load(recorded)
    rows = run(scenario).rows
    golden = load_golden(golden_file(recorded, "golden"))
    has_adapters = scenario.config.max_loras is not None
    assert first_difference(rows, golden, ignores_order=has_adapters) is None


def test_faults_of_the_recorded_engine_are_none_of_ours(faulty: str, load: Load, run: Run) -> None:
    reasons = run(load(faulty)).reasons
    # What ends without having finished is what no pool of this size could hold.
    assert all("KV" in reason for reason in reasons.values())


@pytest.mark.parametrize("seed", range(NUM_MUTATIONS))
def test_other_seeds_end_well_in_the_classic_configuration(
    scenario_name: str, seed: int, mutate: Mutate, run: Run
) -> None:
    run(mutate(scenario_name, seed))


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_other_seeds_end_well_in_other_configurations(
    scenario_name: str, options: str, mutate: Mutate, configs: Configs, run: Run
) -> None:
    for_scheduler, for_cache = CONFIGURATIONS[options]
    for seed in range(NUM_MUTATIONS):
        scenario = mutate(scenario_name, seed)
        has_window = scenario.config.sliding_window is not None
        both = configs(scenario.config, for_scheduler, {} if has_window else for_cache)
        run(scenario, Scheduler(*both))


def test_scenarios_run_in_the_default_configuration_as_they_are(
    scenario_name: str, load: Load, configs: Configs, run: Run
) -> None:
    scenario = load(scenario_name)
    run(scenario, Scheduler(*configs(scenario.config, {}, {})))

"""The scripts that drive the scheduler alone run, count right and say what they promise."""

import gzip
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pagedserve._core import CacheConfig, SchedulerConfig

BENCHES = Path(__file__).resolve().parents[2] / "benches" / "python"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script by name, as its neighbours do."""
    monkeypatch.syspath_prepend(str(BENCHES))
    monkeypatch.syspath_prepend(str(BENCHES / "peer"))
    return importlib.import_module


@pytest.fixture
def simulation(load: Any) -> ModuleType:
    module: ModuleType = load("simulation")
    return module


def test_border_measures_both_settings_of_prefix_caching(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json", "--ns", "3", "--context", "64", "--steps", "10", "--repeat", "1"]
    load("border").main([*options, "--prefix-caching"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["n"], row["prefix_caching"]) for row in rows] == [(3, False), (3, True)]
    assert all(row["us"] > 0 for row in rows)


def test_border_measures_admission(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load("border").main(["--json", "--admission", "--repeat", "1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"] for row in rows] == ["prefix", "unseen"]
    assert all(0 < row["least_us"] <= row["us"] for row in rows)


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_simulated_load_is_served_to_its_end(
    simulation: ModuleType, num_samples: int, *, is_chunked: bool
) -> None:
    prompts = [np.arange(length, dtype=np.int32) for length in (5, 40, 3, 17)]
    load = simulation.Load(
        np.array([0.0, 0.0, 0.01, 9.0]), prompts, np.array([30, 8, 1, 12]), num_samples
    )
    limits = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=16 if is_chunked else 80,
        max_model_len=80,
        enable_chunked_prefill=is_chunked,
    )
    costs = simulation.Costs(step=0.5, token=0.0, row=0.0)
    cache = CacheConfig(block_size=4, num_gpu_blocks=30, num_cpu_blocks=20)
    report = simulation.Simulation(load, limits, cache, costs).run()
    assert (report.requests, report.ended) == (4, 0)
    assert report.computed_tokens >= 65 + num_samples * (30 + 8 + 1 + 12 - 4)
    # The last request waits for nobody for longer than a step, and takes one for each token.
    assert report.virtual_seconds >= 9.0 + 12 * 0.5
    assert report.first_token_p50 >= 0.5
    assert report.latency_p99 > 29 * 0.5


def test_a_request_that_cannot_be_served_is_counted(simulation: ModuleType) -> None:
    prompts = [np.zeros(length, dtype=np.int32) for length in (4, 60)]
    load = simulation.Load(np.zeros(2), prompts, np.array([2, 2]))
    limits = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)
    cache = CacheConfig(block_size=4, num_gpu_blocks=4)
    report = simulation.Simulation(load, limits, cache, simulation.Costs()).run()
    assert (report.ended, report.computed_tokens) == (1, 5)


@pytest.fixture
def hour(tmp_path: Path) -> Path:
    """Three requests of the Mooncake format: the second begins like the first, the third is it."""
    rows = [(1500, [0, 1, 2]), (1100, [0, 1, 3]), (1500, [0, 1, 2])]
    lines = [
        json.dumps({"timestamp": 0, "input_length": n, "output_length": 9, "hash_ids": ids})
        for n, ids in rows
    ]
    with gzip.open(tmp_path / "mooncake_conversation.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize(("tokens_per_id", "block_size"), [(1, 1), (64, 16), (512, 512)])
def test_hits_are_counted_as_the_trace_says(
    load: Any, hour: Path, monkeypatch: pytest.MonkeyPatch, tokens_per_id: int, block_size: int
) -> None:
    traces = load("traces")
    monkeypatch.setattr(traces, "EXPECTED_HITS", 5)
    monkeypatch.setattr(traces, "EXPECTED_IDS", 9)
    found = traces.run_mooncake(hour, tokens_per_id=tokens_per_id, block_size=block_size)
    assert (found.hit_ids, found.full_hits) == (5, 1)
    assert found.hit_tokens == 1024 + 1500
    monkeypatch.setattr(traces, "EXPECTED_HITS", 6)
    with pytest.raises(SystemExit, match="5 of 9 ids hit, not 6 of 9"):
        traces.run_mooncake(hour, tokens_per_id=tokens_per_id, block_size=block_size)


def test_a_missing_trace_is_named(load: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"azure_.*is not there; --traces"):
        load("traces").main(["azure", "--traces", str(tmp_path)])


def test_the_prompts_of_the_peer_are_those_of_its_format(load: Any) -> None:
    driver = load("drive_vllm_v0")
    segments = [{"token_ids": [5]}, {"seed": 2, "len": 2}, {"seed": 2, "len": 1, "offset": 1}]
    second = 10 + (2 * 7919 + 104_729 + 31) % 31_991
    assert driver.expand_prompt(segments) == [5, 10 + 2 * 7919, second, second]


def test_an_unknown_option_is_refused(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("scheduler_options").main(["--fix", "victim_policy=first"])
    assert "may be one of last, least_work" in capsys.readouterr().err

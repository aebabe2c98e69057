import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError
from pagedserve.executor import memory
from pagedserve.executor.local import LocalExecutor
from pagedserve.executor.memory import (
    GIB,
    AvailableMemory,
    free_host_bytes,
    plan_memory,
    shown_bytes,
)
from pagedserve.executor.protocol import StepLimits

MIB = 1 << 20
SIZES = {
    "block_bytes": MIB,
    "block_size": 16,
    "weight_bytes": 5 * MIB,
    "free_bytes": 100 * GIB,
    "free_host_bytes": 50 * GIB,
}


# Of 80 GiB nine tenths, less what is used, activations and graphs.
AVAILABLE = AvailableMemory(
    num_bytes=60 * GIB,
    total_bytes=80 * GIB,
    budget_bytes=72 * GIB,
    used_bytes=6 * GIB,
    activation_bytes=4 * GIB,
    graph_bytes=2 * GIB,
)


def plan(**options: Any) -> memory.MemoryPlan:
    return plan_memory(**(SIZES | options))


def test_a_gibibyte_is_the_default() -> None:
    assert plan().num_gpu_blocks == 1024


def test_the_default_is_never_more_than_is_free() -> None:
    blocks = plan(free_bytes=100 * MIB).num_gpu_blocks
    assert 0 < blocks < 100


def test_without_a_default_all_that_is_usable_is_taken() -> None:
    assert plan(default_bytes=None).num_gpu_blocks > 80 * 1024


def test_given_bytes_are_rounded_down_to_blocks() -> None:
    assert plan(kv_cache_memory=10 * MIB + 5).num_gpu_blocks == 10


def test_given_blocks_win_and_may_be_few() -> None:
    assert plan(num_gpu_blocks=3, kv_cache_memory=GIB, max_model_len=1000).num_gpu_blocks == 3


def test_swap_space_is_as_large_as_the_pool_within_reason() -> None:
    assert plan(num_gpu_blocks=100).num_cpu_blocks == 100
    assert plan(num_gpu_blocks=9000).num_cpu_blocks == 4096
    assert plan(num_gpu_blocks=100, free_host_bytes=60 * MIB).num_cpu_blocks == 30
    assert plan(num_gpu_blocks=100, swap_space=0).num_cpu_blocks == 0
    assert plan(num_gpu_blocks=100, swap_space=0.5).num_cpu_blocks == 512


def test_more_swap_space_than_the_host_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"swap_space requires 60\.00 GiB.*50\.00 GiB are free"):
        plan(swap_space=60)


@pytest.mark.parametrize("option", ["kv_cache_memory", "num_gpu_blocks"])
def test_more_than_is_free_is_refused(option: str) -> None:
    wish = {"kv_cache_memory": GIB, "num_gpu_blocks": 1024}[option]
    with pytest.raises(ConfigError, match=rf"{option} requires .*1\.00 GiB.*500\.00 MiB free"):
        plan(free_bytes=500 * MIB, **{option: wish})


def test_too_little_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"512\.00 KiB holds 0 blocks.*one block needs 1 blocks"):
        plan(kv_cache_memory=MIB // 2)


def test_too_little_for_a_sequence_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one sequence of 200 tokens needs 13 blocks"):
        plan(kv_cache_memory=12 * MIB, max_model_len=200)
    assert plan(kv_cache_memory=13 * MIB, max_model_len=200).num_gpu_blocks == 13


def test_the_sum_names_weights_pool_and_rest() -> None:
    text = plan(num_gpu_blocks=1024).describe()
    assert "weights" in text
    assert "5.00 MiB" in text
    assert "1024 blocks x 1.00 MiB, 16384 tokens in blocks of 16" in text
    assert "99.00 GiB" in text


STATES: dict[str, Any] = {"state_bytes": 2 * MIB, "max_num_seqs": 100}


def test_states_take_their_part_before_the_blocks() -> None:
    found = plan(kv_cache_memory=300 * MIB, **STATES)
    assert (found.num_gpu_blocks, found.groups[0].num_gpu_blocks) == (100, 100)
    assert "states       200.00 MiB  of 100 sequences x 2.00 MiB" in found.describe()
    free = plan(default_bytes=None, free_bytes=1000 * MIB, **STATES)
    assert free.num_gpu_blocks == 1000 * 9 // 10 - 200


def test_the_swap_space_is_for_blocks_and_states() -> None:
    found = plan(num_gpu_blocks=1000, swap_space=1, **STATES)
    assert (found.groups[0].num_cpu_blocks, found.num_cpu_blocks) == (100, 1024 - 200)
    found = plan(num_gpu_blocks=1000, swap_space=0.125, **STATES)
    assert (found.groups[0].num_cpu_blocks, found.num_cpu_blocks) == (32, 64)
    assert found.swap_bytes == 128 * MIB


def test_states_that_leave_nothing_are_refused() -> None:
    message = r"keep 2\.00 MiB of each .* 200\.00 MiB for max_num_seqs, 100, and {} may be used: {}"
    with pytest.raises(ConfigError, match=message.format(r"180\.00 MiB", "lower max_num_seqs$")):
        plan(free_bytes=200 * MIB, **STATES)
    remedy = "lower max_num_seqs or raise kv_cache_memory"
    with pytest.raises(ConfigError, match=message.format(r"150\.00 MiB", remedy)):
        plan(kv_cache_memory=150 * MIB, **STATES)


def test_a_profile_run_says_how_many_blocks_there_are() -> None:
    found = plan(available=AVAILABLE, default_bytes=None, weight_bytes=5 * GIB, free_bytes=74 * GIB)
    assert found.num_gpu_blocks == 60 * 1024
    lines = {line[:13].strip(): line[13:].split()[0] for line in found.describe().splitlines()[1:]}
    sums = {name: float(size) for name, size in lines.items() if name != "swap space"}
    assert sums == {
        "weights": 5,
        "other use": 1,
        "activations": 4,
        "CUDA graphs": 2,
        "KV cache": 60,
        "left free": 8,
    }


def test_a_profile_run_that_leaves_too_little_is_shown_with_its_sum() -> None:
    nothing = dataclasses.replace(AVAILABLE, num_bytes=2 * MIB)
    message = (
        r"of 80\.00 GiB gpu_memory_utilization allows 72\.00 GiB, weights take 5\.00 GiB, CUDA and "
        r"other processes 1\.00 GiB, activations 4\.00 GiB, CUDA graphs 2\.00 GiB: raise"
    )
    with pytest.raises(ConfigError, match=message):
        plan(available=nothing, default_bytes=None, weight_bytes=5 * GIB, max_model_len=100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device would be the GPU")
def test_a_share_of_the_cpus_memory_is_refused(tmp_path: Path, tiny_config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    options: dict[str, Any] = {"load_format": "dummy", "device": "auto"}
    limits = StepLimits(max_num_tokens=64, max_num_rows=4, max_model_len=64)
    args = EngineArgs(str(tmp_path), gpu_memory_utilization=0.5, **options)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is 0\.5, .* on the CPU"):
        LocalExecutor(args).determine_num_blocks(limits)


def test_free_memory_is_the_machines_or_the_control_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_CONTROL_GROUP_FILES", ())
    of_machine = free_host_bytes()
    assert of_machine > 0
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(memory, "_CONTROL_GROUP_FILES", ((str(limit), str(used)),))
    limit.write_text("5000\n")
    used.write_text("3000\n")
    assert free_host_bytes() == 2000
    (tmp_path / "memory.stat").write_text("anon 2500\ninactive_file 400\nactive_file 50\n")
    assert free_host_bytes() == 2450
    limit.write_text("max\n")
    assert abs(free_host_bytes() - of_machine) < GIB


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(5, "5 B"), (2048, "2.00 KiB"), (3 * GIB // 2, "1.50 GiB")]
)
def test_bytes_are_shown_in_the_unit_that_fits(num_bytes: int, text: str) -> None:
    assert shown_bytes(num_bytes) == text

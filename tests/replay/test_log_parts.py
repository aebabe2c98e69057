"""Decision logs in a directory, and the requests that are named in them."""

from pathlib import Path

import numpy as np
import pytest

from pagedserve import CacheConfig, Scheduler, SchedulerConfig
from pagedserve.replay.__main__ import main
from pagedserve.replay.log import replay_log
from pagedserve.replay.log_lines import last_parts
from pagedserve.replay.request_steps import request_steps
from pagedserve.replay.scenario import ScenarioError
from tests.replay.test_cli import BAD_INPUT, SAME, write_log
from tests.replay.test_log import lines_of
from tests.support.random_lives import NUM_STEPS, RandomEngine

MAX_BYTES = 16 << 10


def longest_line(directory: Path) -> int:
    return max(
        len(line) + 1 for part in directory.iterdir() for line in part.read_text().splitlines()
    )


def test_a_log_in_a_directory_is_run_again_from_all_its_parts(tmp_path: Path) -> None:
    RandomEngine("cached", 3, tmp_path, log_max_bytes=8 * MAX_BYTES).run()
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 2
    sizes = [part.stat().st_size for part in parts]
    assert max(sizes) < 8 * MAX_BYTES / 16 + longest_line(tmp_path)
    assert last_parts(tmp_path) == parts[-1:]
    assert replay_log(parts[-1]) == (NUM_STEPS + 1, None, False)
    # A part in the middle is run again from the first one to its own end.
    assert 0 < replay_log(parts[1]).num_steps < NUM_STEPS
    whole = "".join(part.read_text() for part in parts)
    (tmp_path / "whole.jsonl").write_text(whole)
    assert replay_log(tmp_path / "whole.jsonl") == (NUM_STEPS + 1, None, False)


def test_the_oldest_parts_of_a_full_directory_go(tmp_path: Path) -> None:
    for seed in range(3):
        RandomEngine("default", seed, tmp_path, log_max_bytes=MAX_BYTES).run()
        sizes = [part.stat().st_size for part in tmp_path.iterdir()]
        # The last part may end with a line that goes beyond.
        assert MAX_BYTES / 2 < sum(sizes) < MAX_BYTES + longest_line(tmp_path)
    parts = sorted(tmp_path.iterdir())
    assert parts[0].name != "decisions-0001-00001.jsonl"
    assert {part.name[:14] for part in parts} == {"decisions-0003"}
    with pytest.raises(ScenarioError, match="those before it were removed"):
        replay_log(parts[-1])


def test_several_logs_of_a_directory_are_several(tmp_path: Path) -> None:
    for seed in (1, 2):
        RandomEngine("default", seed, tmp_path).run()
    assert [path.name for path in last_parts(tmp_path)] == [
        "decisions-0001-00001.jsonl",
        "decisions-0002-00001.jsonl",
    ]
    for path in last_parts(tmp_path):
        assert replay_log(path) == (NUM_STEPS + 1, None, False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ScenarioError, match="has no decision log"):
        last_parts(tmp_path / "empty")


@pytest.mark.parametrize("request_id", ["cmpl-1", 'a "b"\\c', "line\nand\ttab\x00", "日本語"])
def test_what_a_request_is_called_is_in_the_log(request_id: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    configs = (
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32),
        CacheConfig(block_size=4, num_gpu_blocks=8),
    )
    scheduler = Scheduler(*configs, log=log)
    scheduler.add_seq_group(np.ones(4, np.int32), arrival_time=0.0, request_id=request_id)
    scheduler.schedule(0.0)
    scheduler.flush_log()
    assert lines_of(log)[1]["events"][0][1]["request_id"] == request_id
    assert list(request_steps(log, request_id)) == [
        f"{request_id}: added with 4 tokens",
        f"{request_id}: step 0 at 0.000 s: prefill of 4 tokens, 1 rows",
    ]
    assert replay_log(log) == (1, None, False)


def test_branches_are_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    configs = (
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32),
        CacheConfig(block_size=4, num_gpu_blocks=8),
    )
    scheduler = Scheduler(*configs, log=log)
    branches = [np.array(branch, np.int32) for branch in ([2, 3], [4])]
    prompt = np.ones(9, np.int32)
    scheduler.add_seq_group(prompt, arrival_time=0.0, max_num_running_seqs=2, branches=branches)
    scheduler.schedule(0.0)
    scheduler.flush_log()
    line = lines_of(log)[1]
    assert line["events"][0][1]["branches"] == [[2, 3], [4]]
    assert line["scheduled"][0][1:] == [11 + 2, True, 2]
    assert replay_log(log) == (1, None, False)


def test_a_directory_of_logs_is_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        write_log(tmp_path)
    assert main([str(tmp_path)]) == SAME
    out, _ = capsys.readouterr()
    assert out == "".join(
        f"{tmp_path}/decisions-000{log}-00001.jsonl: 3 steps run again\n" for log in (1, 2)
    )
    (tmp_path / "decisions-0002-00001.jsonl").rename(tmp_path / "decisions-0002-00002.jsonl")
    assert main([str(tmp_path)]) == BAD_INPUT
    assert "those before it were removed" in capsys.readouterr().err


def test_the_steps_of_a_request_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path)
    assert main([str(tmp_path), "--request", "second"]) == SAME
    out, _ = capsys.readouterr()
    assert out.splitlines() == [
        "second-1: added with 12 tokens",
        *(f"second-1: step {step} at {step}.000 s: waits: no_blocks" for step in range(3)),
    ]

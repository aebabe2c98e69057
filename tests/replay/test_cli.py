"""``python -m pagedserve.replay``: what it prints, writes and exits with."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedserve import CacheConfig, Scheduler, SchedulerConfig
from pagedserve.replay.__main__ import main

FindFile = Callable[[str, str], Path]
Raw = Callable[[str], dict[str, Any]]

SMALL = "v062-24-too-long-prompts"
# One of each: plain, gzipped golden, gzipped both, with prefix caching, with adapters.
SEVERAL = [
    SMALL,
    "v062-35-forced-swap",
    "v062-40-mix-0",
    "v062-36-prefix-recompute",
    "v062-20-lora-slots",
]

SAME, DIFFERS, BAD_INPUT = 0, 1, 2


def replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagedserve.replay", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
    )


def unpacked(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pagedserve.replay: error: ")
    assert err.count("\n") == 1
    return err


def write_log(path: Path) -> None:
    """Three decoding steps of one request, and a second request that waits for blocks."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32),
        CacheConfig(block_size=4, num_gpu_blocks=4),
        log=path,
    )
    for request_id, length in (("first", 8), ("second-1", 12)):
        token_ids = np.arange(length, dtype=np.int32)
        scheduler.add_seq_group(token_ids, arrival_time=0.0, request_id=request_id)
    for step in range(3):
        outputs = scheduler.schedule(float(step))
        scheduler.update(
            outputs.step_id,
            np.array([0], np.int32),
            np.array([0, 1], np.int32),
            np.array([7 + step], np.int32),
            np.array([0], np.uint8),
        )
    scheduler.flush_log()


@pytest.mark.parametrize("name", SEVERAL)
def test_the_recorded_decisions_are_found_again(
    name: str, golden_file: FindFile, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario, golden = golden_file(name, "scenario"), golden_file(name, "golden")
    assert main(["--scenario", str(scenario), "--golden", str(golden)]) == SAME
    out, err = capsys.readouterr()
    assert out.startswith(f"{name}: ")
    assert out.endswith("end=done\n")
    assert err == ""


@pytest.mark.parametrize("name", SEVERAL)
def test_rows_are_written_in_the_golden_format(
    name: str, golden_file: FindFile, tmp_path: Path
) -> None:
    scenario, golden = golden_file(name, "scenario"), golden_file(name, "golden")
    out = tmp_path / "rows.jsonl"
    assert main(["--scenario", str(scenario), "--out", str(out)]) == SAME
    header, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    recorded, *recorded_rows = [json.loads(line) for line in unpacked(golden).splitlines()]
    assert (header["golden"], header["scenario"]) == (recorded["golden"], recorded["scenario"])
    assert [row.keys() - {"blocks"} for row in rows] == [
        row.keys() - {"blocks"} for row in recorded_rows
    ]
    # What was written is a golden file itself, gzipped or not.
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(out.read_bytes()))
    for path in (out, packed):
        assert main(["--scenario", str(scenario), "--golden", str(path)]) == SAME


def test_gzipped_and_plain_scenarios_are_the_same(golden_file: FindFile, tmp_path: Path) -> None:
    scenario = golden_file(SMALL, "scenario")
    assert scenario.suffix == ".json"
    packed = tmp_path / "scenario.json.gz"
    packed.write_bytes(gzip.compress(scenario.read_bytes()))
    written = [tmp_path / "plain.jsonl", tmp_path / "packed.jsonl"]
    for source, out in zip((scenario, packed), written, strict=True):
        assert main(["--scenario", str(source), "--out", str(out)]) == SAME
    assert written[0].read_bytes() == written[1].read_bytes()


@pytest.mark.parametrize("key", ["scheduled", "free", "finished", "n_copy", "queue_ids", "after"])
def test_the_first_difference_is_named_by_step_and_key(
    key: str, golden_file: FindFile, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in unpacked(golden_file(SMALL, "golden")).splitlines()]
    for row in rows[5:9]:  # several differ: the first counts
        row[key] = "something else"
    golden = tmp_path / "golden.jsonl"
    golden.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = replay("--scenario", golden_file(SMALL, "scenario"), "--golden", golden)
    assert done.returncode == DIFFERS
    step = rows[5]["step"]
    assert f"differs: step {step}, {key}: " in done.stdout
    assert '"something else" there' in done.stdout
    assert done.stderr == ""


def test_block_numbers_are_not_compared(golden_file: FindFile, tmp_path: Path) -> None:
    name = "v062-09-mixed-swap-recompute"
    golden = tmp_path / "golden.jsonl"
    rows = [json.loads(line) for line in unpacked(golden_file(name, "golden")).splitlines()]
    for row in rows:
        if "blocks" in row:
            row["blocks"] = {"in": [], "out": [], "copy": []}
    golden.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scenario = golden_file(name, "scenario")
    assert main(["--scenario", str(scenario), "--golden", str(golden)]) == SAME


def test_missing_and_extra_steps_differ(
    golden_file: FindFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = str(golden_file(SMALL, "scenario"))
    lines = unpacked(golden_file(SMALL, "golden")).splitlines()
    golden = tmp_path / "golden.jsonl"
    for changed in (lines[:4] + lines[5:], [*lines[:-1], lines[-2], lines[-1]]):
        golden.write_text("\n".join(changed) + "\n")
        assert main(["--scenario", scenario, "--golden", str(golden)]) == DIFFERS
        assert "differs: step" in capsys.readouterr().out


def test_a_recorded_crash_differs(golden_file: FindFile) -> None:
    name = "v062-31-no-cpu-swap-space"
    done = replay(
        "--scenario", golden_file(name, "scenario"), "--golden", golden_file(name, "golden")
    )
    assert done.returncode == DIFFERS
    assert "differs: step 1, error: null here" in done.stdout


@pytest.mark.parametrize("size", [0, 1, 40, 400, -1, -2])
@pytest.mark.parametrize("packed", [False, True])
def test_a_scenario_cut_short_is_refused_in_one_line(
    size: int,
    packed: bool,
    golden_file: FindFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = unpacked(golden_file(SMALL, "scenario")).rstrip().encode()
    path = tmp_path / ("cut.json.gz" if packed else "cut.json")
    whole = gzip.compress(text) if packed else text
    path.write_bytes(whole[: size if size >= 0 else len(whole) + size])
    assert main(["--scenario", str(path)]) == BAD_INPUT
    assert str(path) in error_of(capsys)


def test_a_packed_scenario_that_is_damaged_is_refused(
    golden_file: FindFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(gzip.compress(unpacked(golden_file(SMALL, "scenario")).encode()))
    for damaged in (len(data) // 2, 0):
        changed = data.copy()
        changed[damaged : damaged + 8] = bytes(8)
        path = tmp_path / "damaged.json.gz"
        path.write_bytes(changed)
        assert main(["--scenario", str(path)]) == BAD_INPUT
        assert f"{path} cannot be read" in error_of(capsys)


def test_files_that_are_not_there_are_named(
    golden_file: FindFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario, missing = str(golden_file(SMALL, "scenario")), str(tmp_path / "missing")
    for arguments in (
        [missing],
        ["--scenario", missing],
        ["--scenario", str(tmp_path)],
        ["--scenario", scenario, "--golden", missing],
    ):
        assert main(arguments) == BAD_INPUT
        assert str(tmp_path) in error_of(capsys)


def test_a_request_that_no_step_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    write_log(log)
    assert main([str(log), "--request", "third"]) == BAD_INPUT
    assert f"no step of {log} has the request 'third'" in error_of(capsys)


def test_rows_that_cannot_be_written_are_an_error(golden_file: FindFile, tmp_path: Path) -> None:
    out = tmp_path / "no such folder" / "rows.jsonl"
    done = replay("--scenario", golden_file(SMALL, "scenario"), "--out", out)
    assert done.returncode == BAD_INPUT
    assert str(out) in done.stderr


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], str]:
    def text(data: dict[str, Any]) -> str:
        change(data)
        return json.dumps(data)

    return text


BROKEN_SCENARIOS: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "no JSON": (lambda _: "hello", "not a whole JSON document"),
    "a list": (lambda _: "[1]", "not a scenario"),
    "a number": (lambda _: "3", "not a scenario"),
    "null": (lambda _: "null", "not a scenario"),
    "another format": (broken(lambda data: data.update(format=2)), "format is 2; 1 is understood"),
    "no format": (broken(lambda data: data.pop("format")), "'format'"),
    "no requests": (broken(lambda data: data.pop("requests")), "'requests'"),
    "no aborts": (broken(lambda data: data.pop("aborts")), "'aborts'"),
    "no block size": (broken(lambda data: data["config"].pop("block_size")), "'block_size'"),
    "an unknown option": (broken(lambda data: data["config"].update(speed=9)), "'speed'"),
    "block size 0": (broken(lambda data: data["config"].update(block_size=0)), "block_size is 0"),
    "a named size": (broken(lambda data: data["config"].update(block_size="x")), "block_size"),
    "an unknown policy": (broken(lambda data: data["config"].update(policy="lifo")), "lifo"),
    "no arrival": (broken(lambda data: data["requests"][3].pop("arrival_time")), "arrival_time"),
    "a named step": (broken(lambda data: data["requests"][3].update(step="2")), "not a scenario"),
    "half a step": (broken(lambda data: data["requests"][3].update(step=2.5)), "not a scenario"),
    "no prompt": (broken(lambda data: data["requests"][3].update(prompt=[])), "not a scenario"),
    "a strange segment": (
        broken(lambda data: data["requests"][3].update(prompt=[{"len": 3}])),
        "'seed'",
    ),
    "no tokens": (
        broken(lambda data: data["requests"][3].update(prompt=[{"token_ids": []}])),
        "prompt is empty",
    ),
    "a negative token": (
        broken(lambda data: data["requests"][3].update(prompt=[{"token_ids": [-4]}])),
        "token id -4",
    ),
    "no output": (broken(lambda data: data["requests"][3].update(output_lens=[])), "output_lens"),
    "no samples": (broken(lambda data: data["requests"][3].update(best_of=0)), "best_of"),
    "no beam period": (broken(lambda data: data["requests"][3].update(beam_period=0)), "beam"),
    "too many samples": (
        broken(lambda data: data["requests"][3].update(best_of=10_000)),
        "max_num_running_seqs is 10000",
    ),
}


@pytest.mark.parametrize("case", BROKEN_SCENARIOS)
def test_what_is_no_scenario_is_refused_in_one_line(
    case: str, raw: Raw, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = BROKEN_SCENARIOS[case]
    path = tmp_path / "scenario.json"
    path.write_text(text(raw(SMALL)))
    assert main(["--scenario", str(path)]) == BAD_INPUT
    assert message in error_of(capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line"),
        ("hello\n", "not one whole JSON object a line"),
        ('{"golden":2}\n{"end":{}}\n', "first line"),
        ('{"golden":1,"scenario":"x"}\n', "cut short"),
        ('{"golden":1,"scenario":"x"}\n{"step":0}\n', "cut short"),
        ('{"golden":1,"scenario":"x"}\n{"step":0}\n{"end":{"st', "not one whole JSON object"),
        ("[1]\n[2]\n", "not a JSON object"),
        ('{"golden":1}\n[2]\n', "not a JSON object"),
    ],
)
def test_a_golden_file_cut_short_or_of_another_format_is_refused(
    text: str,
    message: str,
    golden_file: FindFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    golden = tmp_path / "golden.jsonl"
    golden.write_text(text)
    scenario = str(golden_file(SMALL, "scenario"))
    assert main(["--scenario", scenario, "--golden", str(golden)]) == BAD_INPUT
    assert message in error_of(capsys)


def test_a_log_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    write_log(path)
    done = replay(path)
    assert (done.returncode, done.stderr) == (SAME, "")
    assert done.stdout == f"{path}: 3 steps run again\n"
    packed = tmp_path / "decisions.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert replay(packed).returncode == SAME


def test_a_log_that_differs_is_an_exit_of_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decisions.jsonl"
    write_log(path)
    path.write_text(path.read_text().replace('"no_blocks"', '"no_tokens"'))
    assert main([str(path)]) == DIFFERS
    assert "differs: step 0, refused: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line"),
        ("null\n", "not a JSON object"),
        ("[1]\n", "not a JSON object"),
        ('{"golden":1}\n', "first line"),
        ('{"log":2}\n', "the format is 2; 3 and 4 are understood"),
        ('{"log":4}\n', "'scheduler'"),
        ('{"log":4,"scheduler":{"speed":1,"choices":{}},"cache":{}}\n', "speed"),
        ('{"log":4,"scheduler":{"choices":{"speed":1}},"cache":{}}\n', "speed"),
        ('{"log":4,"scheduler":{},"cache":{}}\n', "'choices'"),
        ('{"log":4,"scheduler":3,"cache":{}}\n', "configurations"),
    ],
)
def test_what_is_no_log_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(text)
    assert main([str(path)]) == BAD_INPUT
    assert message in error_of(capsys)


@pytest.mark.parametrize(
    "arguments",
    [[], ["a.log", "--scenario", "b.json"], ["a.log", "--out", "c"], ["a.log", "--golden", "d"]],
)
def test_arguments_that_do_not_go_together_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == BAD_INPUT
    assert "usage: " in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert not done.value.code
    text = capsys.readouterr().out
    assert all(name in text for name in ("log", "--scenario", "--out", "--golden", ".gz"))


def test_importing_replay_needs_numpy_alone() -> None:
    code = (
        "import sys, pagedserve.replay.__main__\n"
        "names = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(*(name for name in names if not name.startswith('_')))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path = {sys.path!r}\n{code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert set(done.stdout.split()) == {"numpy", "pagedserve"}

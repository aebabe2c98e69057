"""The bench of the engine, its profile and its contests; their figures are not judged here."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pagedserve import LLM

BENCHES = Path(__file__).resolve().parents[2] / "benches" / "python"
REQUESTS = [
    {"id": index, "prompt": list(range(100, 100 + num_tokens)), "out": 6}
    for index, num_tokens in enumerate((3, 40, 17))
]
# A peer's script that writes down what it was given; its first line is a log's.
SCRIPT = """
import json, os, pathlib, sys
given = [*sys.argv[1:], os.environ["PEER_MODEL"], os.environ["PEER_WORK"]]
pathlib.Path(__file__).with_suffix(".given").write_text(" ".join(given))
print("[info] ready")
print(json.dumps({{"gen_tps": {rate}, "own_cores": 2, "other_cores": 0, "secs": 1}}))
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script by name, as its neighbours do."""
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module


@pytest.fixture
def engine(load: Any) -> ModuleType:
    module: ModuleType = load("engine")
    return module


@pytest.fixture
def peers_folder(tmp_path: Path) -> Path:
    """What stands for the peers' folder: scripts that print a rate and compute nothing."""
    (tmp_path / "workload_w.json").write_text(json.dumps({"W": REQUESTS}))
    for name, rate in (("e2e_tf", 4), ("e2e_vllm", 20)):
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(name=name, rate=rate))
    return tmp_path


def program(load: Any, name: str, *runs: tuple[float, float]) -> Any:
    """A process that prints runs of (tokens per second, other cores)."""
    rows = [{"gen_tps": rate, "own_cores": 1, "other_cores": other} for rate, other in runs]
    lines = "\n".join(map(json.dumps, rows))
    return load("programs").Program(name, [sys.executable, "-c", f"print({lines!r})"])


@pytest.fixture(scope="module")
def smollm2(model_package: None) -> "LLM":
    """The real model by torch, whose modules are timed."""
    from pagedserve import LLM

    return LLM(model="smollm2", backend="torch", dtype="float32", num_gpu_blocks=2048)


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_engine_measures_a_load(engine: ModuleType, smollm2: "LLM") -> None:
    result = engine.measure(smollm2, REQUESTS)
    assert result.generated_tokens == 18
    assert result.prompt_tokens == 60
    assert 0 < result.first_token_p50 <= result.first_token_p99 < result.seconds
    assert 0 < result.per_output_token_p50 <= result.per_output_token_p99
    assert 0 < result.outside_model < 1
    assert result.peak_rss_gib > 0


def test_a_profile_adds_up(
    load: Any,
    engine: ModuleType,
    smollm2: "LLM",
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages_module = load("stages")  # the machine's rates are measured on small products
    monkeypatch.setattr(stages_module, "PRODUCT_SIZE", 256)
    monkeypatch.setattr(stages_module, "READ_BYTES", 1 << 20)
    scheduler = smollm2.llm_engine.scheduler
    engine.print_profile(smollm2, REQUESTS, engine.GREEDY, as_json=True)
    *stages, machine = printed(capsys)
    everything = stages.pop()
    by_name = {stage["stage"]: stage for stage in stages}
    assert everything["stage"] == "all"
    assert all(stage["seconds"] > 0 for stage in stages if stage["calls"] != 0)
    assert sum(stage["share"] for stage in stages) == pytest.approx(1, abs=1e-3)
    # One step of the prompts and five of one token; whole layers, and the last norm.
    assert by_name["head"]["calls"] == 6
    assert by_name["sampling"]["calls"] == 12  # begun and ended
    assert by_name["scheduling"]["calls"] == 3 * 6
    assert by_name["decoder layers"]["calls"] == 30 * 6
    assert by_name["norms"]["calls"] == 6
    assert by_name["attention"]["calls"] == by_name["linear layers"]["calls"] == 0
    limited = {name for name, stage in by_name.items() if stage["least_seconds"] is not None}
    assert limited == {"decoder layers", "head"}
    assert min(machine["torch_mm_gflops"], machine["packed_gflops"], machine["read_gb_per_s"]) > 0
    # Nothing is left wrapped.
    assert smollm2.llm_engine.scheduler is scheduler
    assert "forward" not in vars(engine.model_of(smollm2))


def test_the_least_seconds_are_those_of_the_load(load: Any, smollm2: "LLM") -> None:
    stages = load("stages")
    rates = stages.Rates(torch_mm_gflops=1, packed_gflops=2, read_gb_per_s=4)
    least = stages.least_seconds(smollm2, REQUESTS, rates)
    num_weights = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    assert least["linear layers"] == pytest.approx(num_weights * (60 + 3 * 5) / 1e9)
    assert least["head"] == pytest.approx(576 * 49152 * 18 / 1e9)
    num_read = sum(prompt + later for prompt in (3, 40, 17) for later in range(6))
    assert least["attention"] == pytest.approx(num_read * 30 * 3 * 128 * 4 / 4e9)


def test_a_contest_ends_when_enough_rounds_were_quiet(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rivals = [
        program(load, "first", (60, 0.0), (80, 0.01), (10, 0.9)),
        program(load, "second", (35, 0.05)),
    ]
    load("programs").compare(rivals, num_rounds=2, max_other_cores=0.05, as_json=True)
    rows = printed(capsys)
    runs = [(row["program"], row["round"], row["is_counted"]) for row in rows[:-2]]
    of_a_round = [("first", True), ("first", True), ("first", False), ("second", True)]
    assert runs == [(name, number, quiet) for number in (1, 2) for name, quiet in of_a_round]
    assert [row["quiet_rounds"] for row in rows[-2:]] == [2, 2]
    assert [row["generated_per_second"] for row in rows[-2:]] == [70, 35]
    assert [row["first / it"] for row in rows[-2:]] == [1, 2]


def test_a_contest_gives_up_on_a_busy_machine(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rivals = [program(load, "first", (60, 0.0)), program(load, "second", (30, 0.3))]
    load("programs").compare(rivals, num_rounds=1, max_other_cores=0.05, as_json=False)
    *runs, heads, first, second = capsys.readouterr().out.splitlines()
    assert sum("is_counted" in line for line in runs) == 3 * 2
    assert heads.split() == ["program", "quiet_rounds", "generated_per_second", "first", "/", "it"]
    assert first.split() == ["first", "3", "60", "1.0"]
    assert second.split() == ["second", "0"]


def test_a_round_ends_with_a_disturbed_first_program(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rivals = [program(load, "first", (60, 0.3)), program(load, "second", (30, 0.0))]
    load("programs").compare(rivals, num_rounds=1, max_other_cores=0.05, as_json=True)
    *runs, first, second = printed(capsys)
    assert [run["program"] for run in runs] == ["first"] * 3
    assert first["generated_per_second"] is second["generated_per_second"] is None


def test_a_program_ends_with_its_contest(load: Any, tmp_path: Path) -> None:
    endless = f"import os, time; print(os.getpid(), file=open({str(tmp_path / 'pid')!r}, 'w'))"
    code = (
        "import sys; from programs import Program, compare\n"
        f"program = Program('one', [sys.executable, '-c', {endless + '; time.sleep(60)'!r}])\n"
        "compare([program], num_rounds=1, max_other_cores=1, as_json=True)"
    )
    contest = subprocess.Popen([sys.executable, "-c", code], cwd=BENCHES)
    while not (tmp_path / "pid").exists() or not (pid := (tmp_path / "pid").read_text().strip()):
        time.sleep(0.05)
    contest.terminate()
    assert contest.wait() == 128 + 15
    assert not Path(f"/proc/{pid}").exists()


def test_a_program_without_runs_is_named(load: Any) -> None:
    with pytest.raises(RuntimeError, match="silent printed no run"):
        program(load, "silent").measure()


def test_peers_are_given_the_load_and_our_weights(
    engine: ModuleType,
    model_package: None,
    peers_folder: Path,
) -> None:
    workload = peers_folder / "workload_w.json"
    words = ["--workload", str(workload), "--peers", str(peers_folder), "--threads", "2"]
    words += ["--vllm-python", sys.executable, "--transformers"]
    options = engine.options_from(words)
    _, vllm, transformers = engine.programs(options, peers_folder / "work")
    figures = {"own_cores": 2, "other_cores": 0}
    assert vllm.measure() == [{"generated_per_second": 20, **figures}]
    assert transformers.measure() == [{"generated_per_second": 4, **figures}]
    asked = {"e2e_vllm": "float32 64 2048 W", "e2e_tf": "static float32 16 W 3 1"}
    for name, words_given in asked.items():
        line = (peers_folder / f"{name}.given").read_text()
        given, weights, work = line.rsplit(" ", 2)
        assert (given, work) == (words_given, str(peers_folder / "work"))
        assert (Path(weights) / "model.safetensors").is_file()


def test_another_workload_than_that_of_the_peers_is_refused(
    engine: ModuleType, peers_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"W": REQUESTS[:1]}))
    words = ["--workload", str(other), "--peers", str(peers_folder), "--threads", "2"]
    words.append("--transformers")
    with pytest.raises(SystemExit, match=r"--peers measures the workload in .* not .*other\.json"):
        engine.main(words)


@pytest.mark.slow
def test_variants_are_compared_in_processes_of_their_own(
    engine: ModuleType, model_package: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"W": REQUESTS}))
    words = ["--workload", str(workload), "--num-requests", "2", "--compare", "--json"]
    engine.main([*words, "--max-other-cores", "1000"])
    rows = printed(capsys)
    names = [f"pagedserve {variant}" for variant in engine.VARIANTS]
    table = rows[-len(names) :]
    assert [row["program"] for row in table] == names
    assert [row["kind"] for row in table] == ["median"] * len(names)
    assert all(row["quiet_rounds"] == 1 and row["pagedserve best / it"] > 0 for row in table)
    assert [row["program"] for row in rows[: -len(names)]] == [
        name for name in names for _ in (1, 2)
    ]


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--profile", "--compare"], "--profile is of one run"),
        (["--vllm-python", "python"], "--peers is where the scripts are"),
        (["--peers", "."], "--vllm-python and --transformers say which"),
        (["--peers", ".", "--vllm-python", "python", "--num-requests", "3"], "leave out --num-req"),
        (["--peers", ".", "--transformers", "--threads", "1"], "give --threads 2"),
        (["--peers", ".", "--transformers", "--sampling", "mixed"], "--peers is greedy"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    engine: ModuleType, words: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        engine.options_from(["--workload", "w.json", "--threads", "2", *words])
    assert refusal in capsys.readouterr().err

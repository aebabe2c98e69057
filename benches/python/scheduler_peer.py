"""The scheduler beside vLLM's, measured in turn on one machine: microseconds and their ratio.

Ours is `border.py`: `schedule`, `prepare_inputs` and `update` through Python.  Theirs is a script
that times the scheduler of an unpacked vLLM 0.6.2 wheel: its `schedule`, which builds no inputs,
and what its engine does after a step (see `peer/drive_vllm_v0.py`, which that script imports).
Both decode sequences of equal lengths, so the median step of neither maps a block.  Every N is
measured by both, one after the other, each in a process of its own.  `other` is the processor time
of everybody else, in cores: throw a line away when it is much above 0.05.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parent
# The peer's names of the cases of admission, and ours.
ADMISSION = {"prefix": "prefix", "evict": "unseen"}


@dataclass(slots=True)
class Neighbours:
    """Cores that other processes kept busy while a block ran."""

    cores: float = 0.0


def busy_seconds() -> float:
    """Processor seconds of the whole machine since it started (Linux)."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextmanager
def neighbours() -> Iterator[Neighbours]:
    """Measure what others use of the processor meanwhile."""
    found = Neighbours()
    started, busy, own = perf_counter(), busy_seconds(), own_seconds()
    yield found
    others = (busy_seconds() - busy) - (own_seconds() - own)
    found.cores = max(0.0, others / (perf_counter() - started))


def rows_of(command: Sequence[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run a bench that prints one JSON object a line."""
    done = subprocess.run(
        command, check=True, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


class Benches:
    """Both benches as commands."""

    def __init__(self, options: argparse.Namespace) -> None:
        python = [options.peer_python, str(options.peer.resolve())]
        self._peer = [*python, "--root", str(options.root.resolve()), "--kind", "v0"]
        self._border = [sys.executable, str(HERE / "border.py"), "--json"]
        self._repeat = ["--repeat", str(options.repeat)]

    def ours(self, *arguments: str) -> list[dict[str, Any]]:
        """The rows of the border bench."""
        return rows_of([*self._border, *self._repeat, *arguments], {})

    def theirs(self, *arguments: str) -> list[dict[str, Any]]:
        """The rows of the peer's bench, which finds its driver beside this script."""
        return rows_of([*self._peer, *arguments], {"PYTHONPATH": str(HERE / "peer")})


def decode_rows(benches: Benches, num_seqs: int) -> Iterator[dict[str, Any]]:
    """Steady decode of N sequences, without and with prefix caching."""
    with neighbours() as others:
        ours = benches.ours("--ns", str(num_seqs), "--prefix-caching", "--equal-lengths")
        theirs = benches.theirs("--only", "decode", "--ns", str(num_seqs), "--caching", "0,1")
    by_setting = {bool(row["caching"]): row for row in theirs}
    for row in ours:
        peer = by_setting[row["prefix_caching"]]
        total = peer["sched_us"] + peer["update_us"]
        yield {
            "case": "decode",
            "n": num_seqs,
            "prefix_caching": row["prefix_caching"],
            "us": row["us"],
            "peer_us": round(total, 1),
            "peer_schedule_us": peer["sched_us"],
            "ratio": round(total / row["us"], 1),
            "other_cores": round(others.cores, 2),
        }


def admission_rows(benches: Benches) -> Iterator[dict[str, Any]]:
    """Both cases of admission, microseconds a request."""
    with neighbours() as others:
        ours = {row["case"]: row["us"] for row in benches.ours("--admission")}
        theirs = [row for case in ADMISSION for row in benches.theirs("--only", case)]
    for row in theirs:
        us = ours[ADMISSION[row["bench"]]]
        yield {
            "case": ADMISSION[row["bench"]],
            "n": row["admitted"],
            "prefix_caching": True,
            "us": us,
            "peer_us": row["per_req_us"],
            "ratio": round(row["per_req_us"] / us, 1),
            "other_cores": round(others.cores, 2),
        }


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    cached = "yes" if row["prefix_caching"] else "no"
    schedule = f"{row['peer_schedule_us']:>12.1f}" if "peer_schedule_us" in row else " " * 12
    print(
        f"{row['case']:<8}{row['n']:>6}{cached:>8}{row['us']:>12.2f}{row['peer_us']:>12.1f}"
        f"{schedule}{row['ratio']:>9.1f}{row['other_cores']:>8.2f}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both and print a table, or one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path("../shared/peers/bench_sched.py")
    parser.add_argument("--peer", type=Path, default=default, help="the peer's bench script")
    parser.add_argument("--root", type=Path, required=True, help="the unpacked vLLM 0.6.2 wheel")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--ns", default="1,16,64,256,1024", help="sequences, by commas")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of ours")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    for path in (options.peer, options.root / "vllm"):
        if not path.exists():
            parser.error(f"{path} is not there")
    benches = Benches(options)
    if not options.json:
        print("microseconds, a step of N sequences or a request admitted")
        names = ("case", "N", "cached", "ours", "0.6.2", "its schedule", "ratio", "other")
        widths = ("<8", ">6", ">8", ">12", ">12", ">12", ">9", ">8")
        print("".join(f"{name:{width}}" for name, width in zip(names, widths, strict=True)))
    show = (lambda row: print(json.dumps(row), flush=True)) if options.json else print_row
    for num_seqs in map(int, options.ns.split(",")):
        for row in decode_rows(benches, num_seqs):
            show(row)
    for row in admission_rows(benches):
        show(row)


if __name__ == "__main__":
    main()

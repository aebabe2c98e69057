"""Decode steps of two checkouts of pagedserve in turn: what a change costs who does not use it.

Each has a process of its own and is told when to take a step, so both see a machine that drifts.
A ratio is that of the medians of a round, this checkout over the other.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import IO, cast

from measuring import report_table

HERE = Path(__file__).parents[2]
NUM_TOKENS = 60
# Steps with prompts are left out.
NUM_WARM_UP = 5
# Adds as many requests as a line says, takes a step, and answers with its seconds.
WORKER = f"""
import sys, time
from pagedserve import LLM, SamplingParams

engine = LLM(sys.argv[1], dtype=sys.argv[2], max_model_len=512, use_tqdm_on_load=False).llm_engine
params = SamplingParams(temperature=0, max_tokens={NUM_TOKENS}, ignore_eos=True)
for line in sys.stdin:
    for row in range(int(line)):
        engine.add_request(str(row), f"Story {{row}}, about the sea:", params)
    started = time.perf_counter()
    engine.step()
    print(time.perf_counter() - started, flush=True)
"""


class Version:
    """A checkout whose extension is built, and a process that takes steps with it."""

    def __init__(self, checkout: Path, model: str, dtype: str) -> None:
        there = {"PYTHONPATH": str(checkout.resolve() / "python")}
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, model, dtype],
            # A thread that spins would take a core from the other process.
            env=os.environ | there | {"OMP_WAIT_POLICY": "passive"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._orders = cast(IO[str], process.stdin)
        self._answers = cast(IO[str], process.stdout)
        self.step(1)
        self.finish()

    def step(self, num_requests: int = 0) -> float:
        """Seconds of a step, before which requests come."""
        print(num_requests, file=self._orders, flush=True)
        return float(self._answers.readline())

    def finish(self) -> None:
        """Take the steps that requests still need."""
        for _ in range(NUM_TOKENS):
            self.step()


def round_of(versions: Sequence[Version], num_rows: int) -> list[float]:
    """Milliseconds of a decode step of each: the medians of their steps in turn."""
    seconds: list[list[float]] = [[] for _ in versions]
    for turn in range(NUM_TOKENS):
        order = list(zip(versions, seconds, strict=True))
        for version, spent in order if turn % 2 else reversed(order):
            spent.append(version.step(0 if turn else num_rows))
    for version in versions:
        version.finish()
    return [1e3 * median(spent[NUM_WARM_UP:]) for spent in seconds]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="a checkout that has been built (make build)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args(arguments)
    versions = [Version(root, options.model, options.dtype) for root in (HERE, options.other)]
    table: list[dict[str, object]] = []
    for num_rows in options.rows:
        rounds = [round_of(versions, num_rows) for _ in range(options.rounds)]
        ratios = [here / there for here, there in rounds]
        table.append(
            {
                "rows": num_rows,
                "here ms": median(here for here, _ in rounds),
                "other ms": median(there for _, there in rounds),
                "ratio": median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    report_table("decode step", table, as_json=options.json)


if __name__ == "__main__":
    main()

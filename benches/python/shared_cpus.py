"""Engines that share CPUs: one beside another, and one under a quota of CPU time.

`pair`: two engines of one thread each, at the same time, beside one engine of two threads.
`quota`: an engine whose control group may use one CPU beside one that may use two; each chooses
its number of threads itself.  It needs a control group that this user may make.

All engines are loaded first and then run in turn, because the clock of a machine drifts.  Figures
are medians over the rounds; shares are of the other speed in the same round.  Only on a quiet
machine do they say anything: `cores`, the processor time of all processes, is then no more than
the engines'.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from loads import generate, read_load
from measuring import Clock, report_table

from pagedserve import LLM

MOUNTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
PERIOD_US = 100_000


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "native"))
    parser.add_argument("--workload", type=Path, required=True, help="JSON with the load W")
    parser.add_argument("--num-requests", type=int, help="of the load; all without it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("pair", "quota"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        _serve(args)
        return
    rows = []
    with ExitStack() as stack:
        for name, settings in _comparisons(stack, args.only).items():
            rows.append(_compare(name, settings, args.rounds))
    report_table("tokens a second", rows, as_json=args.json)


class Engine:
    """An engine in a separate process, which runs the load on request."""

    def __init__(self, *, num_threads: int | None = None, group: Path | None = None) -> None:
        environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
        if num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(num_threads)
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--engine"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # It joins its group before it counts its CPUs.
            preexec_fn=None if group is None else lambda: _join(group),  # noqa: PLW1509
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        self._process, self._orders, self._results = process, process.stdin, process.stdout
        self.finish()

    def start(self) -> None:
        """Begin with the load."""
        print("run", file=self._orders, flush=True)

    def finish(self) -> int:
        """Wait for the end of the load, and return its tokens."""
        line = self._results.readline()
        if not line:
            raise RuntimeError(f"an engine ended with status {self._process.wait()}")
        return int(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def _serve(args: argparse.Namespace) -> None:
    """Run the load for each line of standard input, and print its number of tokens."""
    results, sys.stdout = sys.stdout, sys.stderr
    requests = read_load(args.workload, "W", args.num_requests)
    llm = LLM(
        args.model,
        dtype=args.dtype,
        backend=args.backend,
        max_model_len=2048,
        use_tqdm_on_load=False,
    )
    generate(llm, requests[:2])
    print(0, file=results, flush=True)
    for _ in sys.stdin:
        generate(llm, requests)
        print(sum(request["out"] for request in requests), file=results, flush=True)


def _comparisons(stack: ExitStack, only: str | None) -> dict[str, list[list[Engine]]]:
    """Engines that run at the same time, in two settings to compare; they end with the stack."""

    def engine(**settings: object) -> Engine:
        made = Engine(**settings)  # type: ignore[arg-type]
        stack.callback(made.close)
        return made

    found = {}
    if only != "quota":
        one = [engine(num_threads=2)]
        found["pair"] = [one, [engine(num_threads=1), engine(num_threads=1)]]
    if only != "pair":
        groups = [stack.enter_context(_group(f"pagedserve-{cpus}", cpus)) for cpus in (2, 1)]
        found["quota"] = [[engine(group=group)] for group in groups]
    return found


def _compare(name: str, settings: Sequence[list[Engine]], rounds: int) -> dict[str, object]:
    rates: list[list[float]] = [[], []]
    cores = []
    for number in range(rounds):
        for engines, found in zip(settings, rates, strict=True):
            with Clock() as clock:
                started = time.perf_counter()
                for engine in engines:
                    engine.start()
                num_tokens = sum(engine.finish() for engine in engines)
                found.append(num_tokens / (time.perf_counter() - started))
            cores.append(clock.own_cores + clock.other_cores)
        print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    shares = [second / first for first, second in zip(*rates, strict=True)]
    return {
        "comparison": name,
        "first": statistics.median(rates[0]),
        "second": statistics.median(rates[1]),
        "second to first": statistics.median(shares),
        "lowest": min(shares),
        "highest": max(shares),
        "cores": statistics.median(cores),
    }


@contextmanager
def _group(name: str, num_cpus: int) -> Iterator[Path]:
    """A control group that may use so many CPUs."""
    mount = next((mount for mount in MOUNTS if (mount / "cgroup.procs").exists()), None)
    if mount is None:
        raise RuntimeError(f"no control groups below {' or '.join(map(str, MOUNTS))}")
    group = mount / f"{name}-{os.getpid()}"
    group.mkdir()
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{num_cpus * PERIOD_US} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(num_cpus * PERIOD_US))
        yield group
    finally:
        for _ in range(100):  # its processes are gone a moment after their end
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.05)
            else:
                break


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


if __name__ == "__main__":
    main()

"""Hostile requests against a running server, with victims beside: ``make hostile``.

    python -m tests.hostile [--requests N] [--seed S] [--kinds PATTERN ...] [--only NUMBER ...]
    python -m tests.hostile --faults [NAME ...]

The exit status is 1 where the server died, a victim's text changed, a request was answered with a
fault of the server or never, /health was not answered, or blocks or memory are not back.  With
--faults the faults of processes are tried instead, each on a server of its own.
"""

import http.client
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from tqdm import tqdm

from tests.hostile.faults import FAULTS
from tests.hostile.kinds import KINDS
from tests.hostile.model import save_byte_llama
from tests.hostile.storm import Report, run_storm

# How much more memory may be resident at the end than once the server is warm.
_MAX_GROWTH: Final = 0.1
_SHOWN_FAULTS: Final = 20


def main() -> int:
    """Run the stress, print the table; the exit status."""
    parser = ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of all requests")
    parser.add_argument("--clients", type=int, default=32, help="requests at once")
    parser.add_argument("--kinds", nargs="+", default=["*"], help="patterns of kinds; all of them")
    parser.add_argument("--only", nargs="+", type=int, help="numbers of requests, to send again")
    parser.add_argument("--keep", type=Path, help="empty directory for the model and the log")
    parser.add_argument("--faults", nargs="*", help="faults of processes; all of them")
    options = parser.parse_args()
    if options.faults is not None:
        return try_faults(options.faults)
    kinds = [kind for kind in KINDS if any(fnmatch(kind.name, each) for each in options.kinds)]
    if not kinds:
        parser.error(f"no kind has such a name; there are: {', '.join(k.name for k in KINDS)}")
    numbers: Sequence[int] = options.only or range(options.requests)
    with (
        tempfile.TemporaryDirectory() as temporary,
        tqdm(total=len(numbers), unit="request") as bar,
    ):
        report = run_storm(
            options.keep or Path(temporary),
            kinds,
            numbers=numbers,
            seed=options.seed,
            num_clients=options.clients,
            quiet_seconds=10,
            # An idle server has returned freed memory after half of it; but the body of a client
            # that left is still read to its end.
            settle_seconds=6,
            niceness=19,  # making bodies does not take the server's processors
            on_sent=bar.update,
        )
    faults = [*report.faults, *growth(report)]
    sys.stdout.write(table(report))
    for fault in faults[:_SHOWN_FAULTS]:
        sys.stdout.write(f"FAULT: {fault}\n")
    sys.stdout.write(f"{len(faults)} faults\n")
    return int(bool(faults))


def try_faults(names: Sequence[str]) -> int:
    """Try faults of processes, print what came of each; the exit status."""
    status = 0
    with tempfile.TemporaryDirectory() as temporary:
        model = save_byte_llama(Path(temporary) / "model")
        for fault in FAULTS:
            if names and fault.__name__ not in names:
                continue
            directory = Path(temporary) / fault.__name__
            directory.mkdir()
            try:
                fault(model, directory)
            except (AssertionError, OSError, http.client.HTTPException) as error:
                status = 1
                sys.stdout.write(f"{fault.__name__:24} FAULT: {error!r}\n")
            else:
                sys.stdout.write(f"{fault.__name__:24} as it shall be\n")
            sys.stdout.flush()
    return status


def growth(report: Report) -> list[str]:
    """What is wrong with the server's memory."""
    warm, end = report.memory
    if end > warm * (1 + _MAX_GROWTH):
        return [f"{end >> 20} MiB are resident; {warm >> 20} MiB were once the server was warm"]
    return []


def table(report: Report) -> str:
    """Outcomes by kind, and what victims saw."""
    lines = [f"{'kind':24} {'number':>8} {'slowest s':>10}  outcomes"]
    for name, tally in sorted(report.storm.tallies.items()):
        outcomes = ", ".join(f"{key}: {count}" for key, count in sorted(tally.outcomes.items()))
        lines.append(f"{name:24} {tally.outcomes.total():8} {tally.slowest:10.2f}  {outcomes}")
    alone, beside = report.alone, report.beside
    rate = report.num_measured / report.seconds if report.seconds else 0.0
    warm, end = report.memory
    longest = [max(found.gaps, default=0.0) * 1000 for found in (alone, beside)]
    streams = f"{alone.num_streams} streams alone, {beside.num_streams} beside"
    gaps = f"{longest[0]:.0f} ms alone, {longest[1]:.0f} ms beside"
    lines += [
        f"{report.num_measured} requests in {report.seconds:.0f} s, {rate:.0f} a second",
        f"victims: {streams}, of which {beside.num_refused} found no place at first",
        f"longest gap between two steps of a victim: {gaps}",
        f"/health: {beside.num_probes} probes, the slowest {beside.slowest_probe * 1000:.0f} ms",
        f"resident: {warm >> 20} MiB warm, {end >> 20} MiB at the end",
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())

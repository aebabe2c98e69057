"""The engine beside busy processes: what one stream, sixteen and a workload keep of their speed.

A neighbour is a loop that never sleeps, pinned to one core.  Quiet runs and runs beside one
neighbour, and beside one on each core, alternate, because the clock of a machine drifts.  Figures
are medians over the rounds; shares are of the quiet speed in the same round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loads import Request, generate, read_load
from measuring import report, report_table

from pagedserve import LLM

BUSY = "import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
STREAMS = {"one": (1, 64), "sixteen": (16, 32)}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--workload", type=Path, help="JSON with the load W; without it no W")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, max_model_len=2048, use_tqdm_on_load=False)
    loads = {name: _streams(llm, *sizes) for name, sizes in STREAMS.items()}
    if args.workload is not None:
        loads["W"] = read_load(args.workload, "W", None)
    for name in STREAMS:
        generate(llm, loads[name])
    cores = sorted(os.sched_getaffinity(0))
    beside = {"quiet": [], "one": cores[-1:], "all": cores}
    rates: dict[str, dict[str, list[float]]] = {name: {key: [] for key in beside} for name in loads}
    for number in range(args.rounds):
        for name, requests in loads.items():
            for key, taken in beside.items():
                with neighbours(taken):
                    rates[name][key].append(_rate(llm, requests))
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    report("setting", {"dtype": args.dtype, "cores": len(cores)}, as_json=args.json)
    rows = [_row(name, found) for name, found in rates.items()]
    report_table("tokens a second, and shares of the quiet speed", rows, as_json=args.json)


def _streams(llm: LLM, num_streams: int, num_tokens: int) -> list[Request]:
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode("The history of the steam engine begins in antiquity, when")
    return [
        {"id": index, "prompt": [*prompt, index + 20], "out": num_tokens}
        for index in range(num_streams)
    ]


def _rate(llm: LLM, requests: Sequence[Request]) -> float:
    started = time.perf_counter()
    generate(llm, requests)
    return sum(request["out"] for request in requests) / (time.perf_counter() - started)


def _row(name: str, found: dict[str, list[float]]) -> dict[str, object]:
    quiet = found["quiet"]
    row: dict[str, object] = {"load": name, "quiet": statistics.median(quiet)}
    for key, rates in found.items():
        if key != "quiet":
            shares = [rate / alone for rate, alone in zip(rates, quiet, strict=True)]
            row[f"beside {key}"] = statistics.median(shares)
    return row


@contextmanager
def neighbours(cores: Sequence[int]) -> Iterator[None]:
    """A busy process on each of these cores while the block runs."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY.format(core=core)]) for core in cores]
    time.sleep(0.3 if busy else 0)
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()

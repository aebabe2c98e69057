"""What a user waits for before anything is computed: the import, and the command line's --help.

Each in processes of its own; the least of the rounds, for the rest is the machine's.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from time import perf_counter

COMMANDS = {
    "import pagedserve": ("-c", "import pagedserve"),
    "pagedserve --help": ("-c", "from pagedserve.cli import main; main(['--help'])"),
    "python alone": ("-c", ""),
}


def seconds_of(command: Sequence[str]) -> float:
    """How long one process takes from its start to its end."""
    started = perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return perf_counter() - started


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print, a line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(words)
    for name, command in COMMANDS.items():
        seconds = min(seconds_of(command) for _ in range(options.rounds))
        if options.json:
            print(json.dumps({"case": name, "ms": round(seconds * 1000, 1)}))
        else:
            print(f"{name:20} {seconds * 1000:8.1f} ms")


if __name__ == "__main__":
    main()

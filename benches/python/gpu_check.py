"""Everything that needs a GPU, in one command: the kernels, the engine, the benchmarks, a table.

    pip install --no-deps dist/pagedserve-*.whl     # no Rust here: the extension comes in a wheel
    make gpu-check

Run from the repository with Python 3.12, torch 2.11, triton 3.6, transformers 5.17, pytest,
pytest-timeout, hypothesis and, to be in time, pytest-xdist.  Where there is no .venv,
`make gpu-check BIN=$(dirname $(which python))` or this script by itself.  The package is that of
the repository, as built in place; if it has no extension, the wheel's is linked into it.

Parts run one after the other, each in a process of its own with a limit, and may print bars: lines
of JSON with a name, what is asked, what was measured and whether it holds.  The exit status is 0 if
all hold, 1 if one does not, 2 where there is no GPU.
"""

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring import report_table

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "pagedserve"
BENCHES = Path(__file__).parent
# All but the one that compiles ahead of time for devices that are not there.
KERNEL_TESTS = ("tests/kernels", "--ignore", "tests/kernels/test_compile.py")
# By file: others of their folders import packages that are not needed here.
ENGINE_TESTS = ("tests/engine/test_gpu.py", "tests/models/load/test_dummy.py")


@dataclass(frozen=True, slots=True)
class Part:
    """A program of the check.

    Attributes:
        name: for people.
        command: after the interpreter.
        seconds: after which it is given up.
        num_gpus: that it takes; where there are fewer it is left out.
    """

    name: str
    command: Sequence[str]
    seconds: int
    num_gpus: int = 1

    def run(self) -> list[dict[str, Any]]:
        """Run it, show what it prints, and give its bars; its end is one of them."""
        print(f"== {self.name}", flush=True)
        started = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, *self.command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=self.seconds)
                ending = f"status {process.returncode}"
            except subprocess.TimeoutExpired:
                # With all that it started: who lives on holds the pipe, and maybe the GPU.
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
                ending = f"given up after {self.seconds} s"
        output = said.decode(errors="replace")
        print(output, flush=True)
        seconds = time.perf_counter() - started
        end = {
            "name": self.name,
            "bar": "ends well",
            "measured": f"{ending}, {seconds:.0f} s",
            "holds": ending == "status 0",
        }
        return [end, *bars_in(output.splitlines())]


def bars_in(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The bars among the lines that a part printed: those of the engine or of the kernels."""
    for line in lines:
        row = json.loads(line) if line.startswith('{"kind": ') else {}
        if row.get("kind") == "bar":
            yield {name: row[name] for name in ("name", "bar", "measured", "holds")}
        elif row.get("kind") == "kernels" and row["bar"] is not None:
            yield {
                "name": row["what"],
                "bar": f"{row['bar']:.0%} of {row['of']}",
                "measured": f"{row['rate']:.0f} {row['unit']}, {row['share']:.0%}",
                "holds": row["holds"] == "yes",
            }


def parts() -> list[Part]:
    """All parts; the limits of those for one GPU sum up to less than 8 minutes."""
    # Warnings are errors where the package is made, with versions that are known there.
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")
    # Most of the time goes to compilers, of which a process runs one at a time.
    side_by_side = ("-n", "8") if find_spec("xdist") else ()
    engine = str(BENCHES / "gpu_engine.py")
    return [
        Part("kernel tests", (*pytest, *side_by_side, *KERNEL_TESTS), 100),
        Part("engine tests", (*pytest, "-m", "gpu", *ENGINE_TESTS), 55),
        Part("engine, tokens", (engine, "exact"), 75),
        Part("kernels", (str(BENCHES / "kernels.py"), "--json"), 80),
        Part("engine, decode steps", (engine, "decode"), 70),
        Part("engine, throughput", (engine, "throughput"), 95),
        Part("engine, ranks", (engine, "ranks"), 120, num_gpus=2),
    ]


def find_extension() -> None:
    """Link the extension of an installed wheel into the repository's package, if it has none.

    Raises:
        SystemExit: There is no such wheel.
    """
    if any(PACKAGE.glob("_core*.so")):
        return
    try:
        files = importlib.metadata.files("pagedserve") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("_core") and file.suffix == ".so":
            (PACKAGE / file.name).symlink_to(Path(str(file.locate())).resolve())
            return
    raise SystemExit(
        "gpu-check: no extension in python/pagedserve, and no wheel installed: "
        "pip install --no-deps dist/pagedserve-*.whl"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print the table."""
    every = parts()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in every]
    parser.add_argument("--only", choices=names, action="append", help="a part; may be repeated")
    chosen = parser.parse_args(arguments).only or names

    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} sees no CUDA device here", file=sys.stderr)
        return 2
    find_extension()
    given = os.environ.get("PYTHONPATH")
    paths = (str(ROOT / "python"), str(BENCHES), *([given] if given else []))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["TRITON_INTERPRET"] = "0"  # the tests turn it on where they see no device file
    started = time.perf_counter()
    num_gpus = torch.cuda.device_count()
    wanted = [part for part in every if part.name in chosen]
    for part in (part for part in wanted if part.num_gpus > num_gpus):
        print(f"== {part.name}: left out, it takes {part.num_gpus} GPUs", flush=True)
    rows = [row for part in wanted if part.num_gpus <= num_gpus for row in part.run()]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    print(f"{torch.cuda.get_device_name()}, {versions}, {time.perf_counter() - started:.0f} s")
    shown = [row | {"holds": "yes" if row["holds"] else "NO"} for row in rows]
    report_table("gpu-check", shown, as_json=False)
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

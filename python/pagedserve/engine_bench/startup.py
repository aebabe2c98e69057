"""``bench startup``: seconds until an engine is ready, each in a new process.

A cold start has empty caches of pagedserve, with converted models among them, and of compiled
kernels; a warm one has what earlier starts have written there.  The files of the model are in the
page cache of the system in both, after the first start.
"""

import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

from pagedserve.config import EngineArgs
from pagedserve.engine_bench.options import StartupOptions
from pagedserve.engine_bench.result import BenchResult, Seconds
from pagedserve.errors import ModelLoadError

# Environment variables that name the directory of a cache.
_CACHES = ("PAGEDSERVE_CACHE", "TRITON_CACHE_DIR")


def measure_startup(args: EngineArgs, options: StartupOptions) -> BenchResult:
    """Measure cold starts, then warm ones.

    Raises:
        ConfigError: Options that contradict the model or the memory.
        ModelLoadError: The model cannot be found, read or run, or a process of a start has died.
    """
    cold = Seconds.measured(options.num_iters_cold, "cold starts", partial(_cold_start, args))
    start = partial(_start, args, None)
    Seconds.measured(options.num_iters_warmup, "warm-up starts", start)
    warm = Seconds.measured(options.num_iters_warm, "warm starts", start)
    lines = [*cold.lines("cold startup time"), *warm.lines("warm startup time")]
    return BenchResult(lines, _fields("cold", cold) | _fields("warm", warm))


def _fields(phase: str, seconds: Seconds) -> dict[str, object]:
    """Fields of a phase; those of compilation are zero, since no graph compiler runs."""
    found: dict[str, object] = {}
    none = Seconds([0.0] * len(seconds.samples))
    for name, measured in {"startup": seconds, "compilation": none}.items():
        found[f"avg_{phase}_{name}_time"] = measured.mean
        found[f"{phase}_{name}_times"] = measured.samples
        found[f"{phase}_{name}_percentiles"] = measured.percentiles()
    return found


def _cold_start(args: EngineArgs) -> float:
    with tempfile.TemporaryDirectory(prefix="pagedserve-startup-") as directory:
        return _start(args, Path(directory))


def _start(args: EngineArgs, cache: Path | None) -> float:
    """Start an engine in a new process.

    Args:
        args: Options of the engine.
        cache: Empty directory for its caches; None leaves them where they are.

    Returns:
        Seconds of the start, without those of imports.
    """
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(_seconds_of_start, args, cache).result()
    except BrokenProcessPool as error:
        raise ModelLoadError("the process of a start has died; stderr may say why") from error


def _seconds_of_start(args: EngineArgs, cache: Path | None) -> float:
    if cache is not None:
        os.environ.update({name: str(cache / name.lower()) for name in _CACHES})
    from pagedserve.llm import LLM  # after the caches are known to it

    started = time.perf_counter()
    llm = LLM(**args.llm_options)
    seconds = time.perf_counter() - started
    llm.shutdown()
    return seconds

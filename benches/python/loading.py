"""What loading a model costs: the most memory it takes, its seconds, and when it first says so.

Every start is a process of its own over random weights in a temporary directory, or ``smollm2``, a
GGUF file that a first start converts; a second start finds what the first one left in the cache.

Memory is what the system holds for the process (VmRSS and its peak, VmHWM): its own and that of
files that it maps, read or not yet given back.  ``over_mb`` is the peak less the memory before and
less the model, which is its weights as they are read, in the dtype that computes, or as they are
served, whichever takes more: weights are all there before they are made int8.  The bar is
``allowed_mb``, one layer and 300 MB.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Final, NamedTuple, cast

from measuring import report
from safetensors import safe_open

MB: Final = 10**6
ALLOWED_MB: Final = 300
SHARD: Final = "200MB"


class Case(NamedTuple):
    """Weights in files, and how they are served.

    Attributes:
        name: of the case.
        saved: dtype in the files.
        is_sharded: whether there are several files.
        options: of ``EngineArgs``.
    """

    name: str
    saved: str
    is_sharded: bool
    options: dict[str, Any]


CASES: Final = [
    Case("float32", "float32", False, {}),
    Case("float32, sharded", "float32", True, {}),
    Case("bfloat16 to float32", "bfloat16", False, {}),
    Case("bfloat16 to float32, sharded", "bfloat16", True, {}),
    Case("bfloat16", "bfloat16", False, {"dtype": "bfloat16"}),
    Case("float32 to int8", "float32", False, {"quantization": "int8"}),
    Case("float32, own modules", "float32", False, {"cpu_kernels": "generic"}),
]


def save_weights(directory: Path, case: Case, num_layers: int) -> None:
    """Write a Llama of about 30 MB a layer in float32, and 160 MB of embeddings."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=20_000,
        hidden_size=1024,
        intermediate_size=1792,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.saved))
    model.save_pretrained(directory, max_shard_size=SHARD if case.is_sharded else "50GB")


def memory_mb(field: str) -> float:
    """A figure of this process: VmRSS is its memory now, VmHWM the most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(line for line in lines if line.startswith(field)).split()[1]
    return int(kib) * 1024 / MB


def weights_read_mb(directory: Path, itemsize: int) -> float:
    """All weights in a model's files, at so many bytes each."""
    num_weights = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            num_weights += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return num_weights * itemsize / MB


def load(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Load a model in this process."""
    from pagedserve.config import EngineArgs
    from pagedserve.models.load.files import find_model_files
    from pagedserve.models.loader import load_model

    args = EngineArgs(model=model, **options)
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = perf_counter()
    loaded = load_model(args)
    seconds = perf_counter() - started
    peak, after = memory_mb("VmHWM") - before, memory_mb("VmRSS") - before
    served_mb = loaded.weight_bytes / MB
    read_mb = weights_read_mb(find_model_files(args).directory, loaded.dtype.itemsize)
    model_mb = max(read_mb, served_mb)
    return {
        "read_mb": read_mb,
        "served_mb": served_mb,
        "over_mb": peak - model_mb,
        "allowed_mb": model_mb / loaded.num_layers + ALLOWED_MB,
        "after_mb": after,
        "seconds": seconds,
    }


def say_when(model: str, environment: dict[str, str]) -> dict[str, Any]:
    """Seconds from the start of ``pagedserve generate`` to its first line, and to its end."""
    words = ["generate", "--model", model, "--prompt", "a", "--max-tokens", "1"]
    started = perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "pagedserve", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        said = cast(IO[str], running.stderr)
        line = said.readline().strip()
        first_line = perf_counter() - started
        said.read()
    return {"line": line, "first_line_s": first_line, "end_s": perf_counter() - started}


def rows(num_layers: int, wanted: str) -> Iterator[dict[str, Any]]:
    """Each case, measured."""
    for case in CASES:
        if wanted in case.name:
            with tempfile.TemporaryDirectory() as directory:
                save_weights(Path(directory), case, num_layers)
                yield from measure(case.name, partial(measured_load, directory, case.options))
    if wanted in "smollm2":
        yield from measure("smollm2", partial(measured_load, "smollm2", {}))
    if wanted in "first line":
        yield from measure("first line", partial(say_when, "smollm2"))


def measure(
    case: str, measured: Callable[[dict[str, str]], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A first start, with an empty cache, and a second one."""
    with tempfile.TemporaryDirectory() as cache:
        for start in ("first", "second"):
            found = measured({**os.environ, "PAGEDSERVE_CACHE": cache})
            yield {"case": case, "start": start, **found}


def measured_load(
    model: str, options: dict[str, Any], environment: dict[str, str]
) -> dict[str, Any]:
    """``load`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--load", model, "--options", json.dumps(options)],
        check=True,
        stdout=subprocess.PIPE,
        env=environment,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="30 MB each in float32")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.load:
        print(json.dumps(load(options.load, options.options)))
        return
    for row in rows(options.layers, options.case):
        report("loading", row, as_json=options.json)


if __name__ == "__main__":
    main()

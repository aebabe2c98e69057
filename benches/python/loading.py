"""What loading a model costs: the most memory it takes, its seconds, and when it first says so.

Every case is a process of its own over random weights in a temporary directory, or ``smollm2``.
``over`` is what the peak is above the memory before plus the weights as they are served; the bar
is one decoder layer and 300 MB.  File pages that are mapped count as memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple

from measuring import report

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


def load(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Load a model in this process."""
    from pagedserve.config import EngineArgs
    from pagedserve.models.loader import load_model

    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    started = perf_counter()
    loaded = load_model(EngineArgs(model=model, **options))
    seconds = perf_counter() - started
    model_mb = loaded.weight_bytes / MB
    over = memory_mb("VmHWM") - before - model_mb
    return {
        "model_mb": model_mb,
        "layer_mb": (model_mb / loaded.num_layers),
        "over_mb": over,
        "after_mb": memory_mb("VmRSS") - before,
        "seconds": seconds,
    }


def rows(num_layers: int, wanted: str) -> Iterator[dict[str, Any]]:
    """Each case, measured."""
    for case in CASES:
        if wanted in case.name:
            with tempfile.TemporaryDirectory() as directory:
                save_weights(Path(directory), case, num_layers)
                yield {"case": case.name, **measure(directory, case.options)}
    if wanted in "smollm2":
        yield {"case": "smollm2", **measure("smollm2", {})}


def measure(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """``load`` in a fresh process, which has no earlier result of the probe."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PAGEDSERVE_CACHE": cache}
        done = subprocess.run(
            [sys.executable, __file__, "--load", model, "--options", json.dumps(options)],
            check=True,
            stdout=subprocess.PIPE,
            env=environment,
        )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


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
    table = []
    for row in rows(options.layers, options.case):
        table.append(row)
        report("loading", row, as_json=True) if options.json else None


if __name__ == "__main__":
    main()

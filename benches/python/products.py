"""Products of rows with a model's packed weights, as they lie in memory between two steps.

The weights are those of many layers, more than the caches hold, as in a model: with few rows the
time is that of reading them.  Kinds of weights are measured in turn, round after round, and the
fastest round counts: what others do on the machine only ever takes time.
"""

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

import torch
from measuring import report_table
from torch import Tensor

from pagedserve import _core
from pagedserve.config.precision import Quantization
from pagedserve.models.fused.cpu.modules import multiply
from pagedserve.models.fused.cpu.packing import pack

# (N, K) of a layer of SmolLM2-135M: q, k and v; output; gate and up; down.
LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))

KINDS: dict[str, tuple[torch.dtype, Quantization | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8, float32 rows": (torch.float32, "int8"),
    "int8, bfloat16 rows": (torch.bfloat16, "int8"),
}


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast one kind of weights was multiplied with so many rows."""

    weights: str
    num_rows: int
    ms: float
    gflops: float
    gb_per_s: float
    times_float32: float


@dataclass(frozen=True, slots=True)
class Layers:
    """Packed weights, and an input and an output for each shape."""

    weights: list[_core.cpu.PackedWeights]
    x: dict[int, Tensor]
    outputs: dict[int, Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes that a call reads at least."""
        return sum(int(packed.nbytes) for packed in self.weights)

    def seconds(self) -> float:
        """Seconds of all products, one after the other."""
        started = perf_counter()
        for packed in self.weights:
            x = self.x[packed.in_features]
            multiply(x, packed, self.outputs[packed.out_features], x.dtype)
        return perf_counter() - started


def make_layers(kind: str, num_layers: int, num_rows: int) -> Layers:
    """Random weights of so many layers."""
    dtype, quantization = KINDS[kind]
    shapes = [torch.randn(n, k).to(dtype) for n, k in LAYER]
    return Layers(
        weights=[pack(w, quantization=quantization) for _ in range(num_layers) for w in shapes],
        x={k: torch.randn(num_rows, k).to(dtype) for _, k in LAYER},
        outputs={n: torch.empty(num_rows, n, dtype=dtype) for n, _ in LAYER},
    )


def measure(num_layers: int, num_rows: int, num_rounds: int) -> Iterator[Rate]:
    """The rate of each kind."""
    layers = {kind: make_layers(kind, num_layers, num_rows) for kind in KINDS}
    best = dict.fromkeys(KINDS, math.inf)
    for _ in range(num_rounds):
        for kind, kind_layers in layers.items():
            best[kind] = min(best[kind], kind_layers.seconds())
    operations = 2 * num_layers * num_rows * sum(math.prod(shape) for shape in LAYER)
    for kind, seconds in best.items():
        yield Rate(
            weights=kind,
            num_rows=num_rows,
            ms=1e3 * seconds,
            gflops=operations / seconds / 1e9,
            gb_per_s=layers[kind].num_bytes / seconds / 1e9,
            times_float32=best["float32"] / seconds,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one line for each kind and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,16,64,128", help="numbers of rows, with commas")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for num_rows in map(int, options.rows.split(",")):
        rates = [asdict(rate) for rate in measure(options.layers, num_rows, options.rounds)]
        report_table(f"{num_rows} rows", rates, as_json=options.json)


if __name__ == "__main__":
    main()

"""Products of rows with the blocks of quantised files, as they lie in memory between two steps.

The weights are those of many layers, more than the caches hold; with ``--layers 1`` they fit, and
what is left is computing.  The fastest round counts.
"""

import argparse
import os
from collections.abc import Iterator
from math import ceil
from time import perf_counter

import numpy as np
from measuring import report_table
from numpy.typing import NDArray

from pagedserve._core import cpu
from pagedserve.native.stored import BLOCK_FORMATS, MADE_STORAGES, SCALED, SIZES

# (N, K) of a layer of SmolLM2-135M's sizes, the hidden size a multiple of each block's.
LAYER = ((960, 512), (512, 512), (3072, 512), (512, 1536))
NUM_LAYERS = 30


def make_layers(blocks: str, num_layers: int) -> list[cpu.PackedWeights]:
    """Weights of so many layers; which numbers they are does not matter."""
    num_weights, num_bytes = SIZES[blocks]
    return [
        cpu.PackedWeights(
            np.full(ceil(n / 64) * 64 * (k // num_weights) * num_bytes, 0x22, np.uint8),
            dtype="float32",
            in_features=k,
            out_features=n,
            sections=[(blocks, n)],
            scales=np.ones(n, np.float32) if blocks in SCALED else None,
        )
        for _ in range(num_layers)
        for n, k in LAYER
    ]


def seconds(layers: list[cpu.PackedWeights], x: NDArray[np.float32], num_threads: int) -> float:
    """Seconds of the products of rows with 30 layers, of which there may be fewer."""
    output = np.empty((len(x), max(n for n, _ in LAYER)), np.float32)
    started = perf_counter()
    for weights in layers * (NUM_LAYERS * len(LAYER) // len(layers)):
        weights.multiply(
            num_rows=len(x),
            x=x.ctypes.data,
            x_stride=x.shape[1],
            output=output.ctypes.data,
            output_stride=output.shape[1],
            output_dtype="float32",
            num_threads=num_threads,
        )
    return perf_counter() - started


def measure(options: argparse.Namespace, num_rows: int) -> Iterator[dict[str, object]]:
    """The time of each kind of blocks."""
    shape = num_rows, max(k for _, k in LAYER)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for blocks in sorted(BLOCK_FORMATS | MADE_STORAGES.keys() | {*SCALED}):
        layers = make_layers(blocks, options.layers)
        best = min(seconds(layers, x, options.threads) for _ in range(options.rounds))
        num_bytes = sum(weights.nbytes for weights in layers) * NUM_LAYERS // options.layers
        yield {"blocks": blocks, "ms": 1e3 * best, "gb_per_s": num_bytes / best / 1e9}


def main() -> None:
    """Measure and print a table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="1", help="numbers of rows, with commas")
    parser.add_argument("--layers", type=int, choices=(1, NUM_LAYERS), default=NUM_LAYERS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--instructions", help="instruction set; the fastest of this CPU if absent")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    cpu.use_instructions(options.instructions)
    for num_rows in map(int, options.rows.split(",")):
        found = list(measure(options, num_rows))
        report_table(f"{num_rows} rows, {options.threads} threads", found, as_json=options.json)


if __name__ == "__main__":
    main()

"""Sampling from a step's logits: the Rust kernels, and the operations of torch that GPUs use.

Both are measured in turn, round after round, and the fastest round counts.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from measuring import report_table
from numpy.typing import NDArray
from torch import Tensor

from pagedserve.sampling.gpu_draw import RandomRows, draw_on_device
from pagedserve.sampling.ops import in_chunks
from pagedserve.sampling.rows import RowSampling
from pagedserve.sampling.sampler import top_logprobs
from pagedserve.sampling.tensors import ops_for

PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
}
NUM_TOP = 5


def ways(logits: Tensor) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """What is measured: its name, the Rust kernel, torch."""
    ops, array = ops_for(None), logits.numpy()
    peaks, _ = ops.argmax(array)
    largest = torch.from_numpy(peaks)
    index = np.arange(len(logits))
    uniforms = np.linspace(0, 1, len(logits), endpoint=False).tolist()
    for name, more in PARAMETERS.items():
        rows = [RowSampling(temperature=0.7, uniforms=(each,), **more) for each in uniforms]

        def in_rust(rows: list[RowSampling] = rows) -> NDArray[np.int32]:
            tokens: NDArray[np.int32] = ops.draw(array, rows, index, peaks)
            return tokens

        def by_torch(rows: list[RowSampling] = rows) -> list[Tensor]:
            return [
                draw_on_device(
                    logits[chunk[0] : chunk[-1] + 1],
                    RandomRows.of([rows[i] for i in chunk], vocab_size=logits.shape[1]),
                    largest[chunk[0] : chunk[-1] + 1],
                )
                for chunk in in_chunks(index, logits.shape[1], ops)
            ]

        if in_rust().tolist() != torch.cat(by_torch()).tolist():
            sys.exit(f"{name}: the tokens differ")
        yield name, in_rust, by_torch
    targets = logits.argmax(dim=-1).numpy()
    yield (
        f"log-probabilities, {NUM_TOP} most likely tokens",
        lambda: top_logprobs(array, targets, NUM_TOP, ops),
        lambda: logits.log_softmax(dim=-1).topk(NUM_TOP),
    )


def fastest(calls: Sequence[Callable[[], object]], num_rounds: int) -> list[float]:
    """Seconds of the fastest round of each."""
    rounds = []
    for _ in range(num_rounds):
        times = [perf_counter()]
        for call in calls:
            call()
            times.append(perf_counter())
        rounds.append(np.diff(times))
    return [float(seconds) for seconds in np.min(rounds, axis=0)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one line for each kind of sampling."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab-sizes", default="49152,262144", help="with commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for vocab_size in map(int, options.vocab_sizes.split(",")):
        generator = torch.Generator().manual_seed(1)
        logits = torch.randn(options.rows, vocab_size, generator=generator) * 4
        table = []
        for name, in_rust, by_torch in ways(logits):
            rust, other = fastest((in_rust, by_torch), options.rounds)
            table.append(
                {
                    "sampling": name,
                    "rust_ms": 1e3 * rust,
                    "torch_ms": 1e3 * other,
                    "ratio": other / rust,
                }
            )
        title = f"{options.rows} rows of {vocab_size} logits"
        report_table(title, table, as_json=options.json)


if __name__ == "__main__":
    main()

"""Decode steps whose rows have adapters, beside the same steps without.

Three models of the same weights: one that knows no adapters, one whose rows have none though it
could, and rows with adapters in turn.  Steps of each are measured in turn; the ratio of a round is
to the step without in the same round.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from measuring import report_table

from pagedserve.attention.metadata import AttentionMetadata, BatchLayout
from pagedserve.cache.engine import CacheEngine
from pagedserve.config import EngineArgs
from pagedserve.lora.apply import AdapterModules
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.adapters import AdapterRows
from pagedserve.models.loader import LoadedModel, load_model
from pagedserve.runner.buffers import StepInputs
from pagedserve.runner.model_runner import Forward

BLOCK_SIZE = 16


class DecodeStep:
    """One token for each of some rows, all with as many keys."""

    def __init__(self, loaded: LoadedModel, num_rows: int, seq_len: int) -> None:
        """Allocate the pools."""
        num_blocks = -(-seq_len // BLOCK_SIZE)
        tables = np.arange(num_rows * num_blocks, dtype=np.int32).reshape(num_rows, -1)
        cache = CacheEngine(
            loaded.layers,
            num_gpu_blocks=tables.size,
            num_cpu_blocks=0,
            block_size=BLOCK_SIZE,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        for pool in cache.gpu_pools:
            pool.zero_()
        layout = BatchLayout(
            query_start=np.arange(num_rows + 1, dtype=np.int32),
            seq_lens=np.full(num_rows, seq_len, dtype=np.int32),
            block_tables=tables,
            block_size=BLOCK_SIZE,
        )
        last = tables[:, -1].astype(np.int64) * BLOCK_SIZE + (seq_len - 1) % BLOCK_SIZE
        self._inputs = StepInputs(
            token_ids=torch.arange(num_rows, dtype=torch.int32)[None] + 100,
            positions=torch.full((1, num_rows), seq_len - 1),
            sample_index=torch.arange(num_rows, dtype=torch.int32),
            metadata=AttentionMetadata(layout, torch.from_numpy(last)),
        )
        self._forward = Forward(loaded, cache)

    @torch.inference_mode()
    def seconds(self, modules: AdapterModules | None, slots: np.ndarray[Any, Any]) -> float:
        """Seconds of one step."""
        started = perf_counter()
        index = self._inputs.sample_index
        rows = AdapterRows(slots, self._inputs.token_ids.device)
        adapters = None if modules is None else modules.of_step(rows)
        self._forward(self._inputs, index, adapters=adapters)
        return perf_counter() - started


def random_adapter(modules: AdapterModules, rank: int, seed: int) -> dict[str, LoraWeights]:
    """Weights for every linear layer but the head, as "all-linear" says."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: LoraWeights(
            (0.02 * torch.randn(rank, num_in, generator=generator)).numpy(),
            (0.02 * torch.randn(num_out, rank, generator=generator)).numpy(),
        )
        for name, (num_in, num_out) in modules.targets.items()
        if name.endswith("_proj")
    }


def load(options: argparse.Namespace, dtype: str) -> LoadedModel:
    """The model, with modules of Rust."""
    return load_model(
        EngineArgs(
            model=options.model,
            dtype=dtype,  # type: ignore[arg-type]
            quantization=options.quantization,
        )
    )


def measure(options: argparse.Namespace, dtype: str, num_rows: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of step."""
    plain, adapted = load(options, dtype), load(options, dtype)
    modules = AdapterModules(adapted, num_slots=options.adapters, max_rank=options.rank)
    for slot in range(options.adapters):
        modules.load(slot, random_adapter(modules, options.rank, slot))
    without = DecodeStep(plain, num_rows, options.seq_len)
    step = DecodeStep(adapted, num_rows, options.seq_len)
    rows = np.arange(num_rows, dtype=np.int32)
    kinds: dict[str, Callable[[], float]] = {
        "without": lambda: without.seconds(None, rows),
        "no row has one": lambda: step.seconds(modules, np.full_like(rows, -1)),
        "one adapter": lambda: step.seconds(modules, np.zeros_like(rows)),
        f"{options.adapters} adapters": lambda: step.seconds(modules, rows % options.adapters),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds + 1):
        for kind, seconds in kinds.items():
            found[kind].append(seconds())
    for kind, seconds_of in found.items():
        ratios = [own / base for own, base in zip(seconds_of, found["without"], strict=True)]
        yield {
            "dtype": dtype,
            "rows": num_rows,
            "step": kind,
            "median_ms": 1e3 * median(seconds_of[1:]),
            "least_ms": 1e3 * min(seconds_of[1:]),
            "median_ratio": median(ratios[1:]),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", default="float32", help="with commas")
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--rows", default="64", help="numbers of rows, with commas")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for dtype in options.dtypes.split(","):
        for num_rows in map(int, options.rows.split(",")):
            rows = list(measure(options, dtype, num_rows))
            report_table(f"{num_rows} rows", rows, as_json=options.json)


if __name__ == "__main__":
    main()

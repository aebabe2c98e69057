"""Measure the attention kernels' configurations on a GPU and print rows for kernels/tuning.py.

    python benches/python/tune_kernels.py                      # all kernels and head sizes
    python benches/python/tune_kernels.py --kernels decode --head-sizes 128

Each candidate attends over the loads that its kernel is for; one that takes more than the device
has is left out.  The fastest is printed beside the table's own.  All candidates are compiled first,
by as many processes as there are cores, into the cache that the measuring one reads.
"""

import argparse
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, get_args

import torch
from measuring import report
from triton.runtime.errors import OutOfResources

from kernels import DTYPE, attention_inputs, device_seconds, require_cuda
from pagedserve.kernels import decode, prefill
from pagedserve.kernels.call import AttentionCall
from pagedserve.kernels.tuning import Config, Kernel, config_for

# Rows of (cached keys, queries) that stand for what a kernel is for, each counted alike.
LOADS: dict[Kernel, list[list[tuple[int, int]]]] = {
    "decode": [[(4095, 1)] * 64, [(32767, 1)], [(511, 1)] * 128],
    "decode_wide": [[(4088, 8)] * 64, [(4080, 16)] * 64, [(32752, 16)]],
    "prefill": [[(0, 8192)], [(4096, 4096)], [(512, 512)] * 8],
    "prefill_plain": [[(0, 8192)], [(4096, 4096)], [(512, 512)] * 8],
}
# What tells prefill from plain prefill; it holds the registers of a cap too, and hides nothing.
WINDOW, SOFTCAP = 2**20, 50.0


def candidates(kernel: Kernel) -> Iterator[Config]:
    """Configurations worth a measurement."""
    if is_prefill(kernel):
        for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            yield Config(rows, keys, warps, stages, 1)
        return
    rows = 16 if kernel == "decode" else 64
    for keys, warps, stages, resident in product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (1, 2, 3)):
        yield Config(rows, keys, warps, stages, resident)


def is_prefill(kernel: Kernel) -> bool:
    """Whether it takes rows of many queries."""
    return kernel in {"prefill", "prefill_plain"}


def launch(kernel: Kernel, config: Config, call: AttentionCall) -> None:
    """Attend once.

    Raises:
        OutOfResources: if the device cannot run the configuration.
    """
    if is_prefill(kernel):
        prefill.launch(call, config, skipped=0)
    else:
        decode.launch(call, config, queries=call.max_query_len)


def seconds_of(kernel: Kernel, config: Config, calls: Sequence[AttentionCall]) -> list[float]:
    """Seconds of each call; raises as `launch` does."""
    return [device_seconds(partial(launch, kernel, config, call)) for call in calls]


def call_of(kernel: Kernel, head_size: int, rows: Sequence[tuple[int, int]]) -> AttentionCall:
    """The attention of rows of (cached keys, queries)."""
    return AttentionCall(
        **attention_inputs(rows, head_size=head_size),
        window=WINDOW if kernel == "prefill" else None,
        softcap=SOFTCAP if kernel == "prefill" else None,
        sinks=None,
        cache_scales=None,
        alibi=None,
        causal=True,
    )


@torch.inference_mode()
def compile_one(kernel: Kernel, head_size: int, config: Config) -> None:
    """Compile a candidate into triton's cache, in a process that ends with the pool."""
    cached, queries = LOADS[kernel][0][0]
    call = call_of(kernel, head_size, [(min(cached, 64), min(queries, 64))])
    with suppress(OutOfResources):
        launch(kernel, config, call)


def compile_all(wanted: Sequence[tuple[Kernel, int]]) -> None:
    """Compile the candidates of all kernels and head sizes."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawned) as pool:
        for kernel, head_size in wanted:
            for config in candidates(kernel):
                pool.submit(compile_one, kernel, head_size, config)


def tune(kernel: Kernel, head_size: int) -> dict[str, Any]:
    """The best configuration: the least sum of times, each relative to the table's own."""
    own = config_for(
        kernel,
        head_size=head_size,
        itemsize=DTYPE.itemsize,
        capability=torch.cuda.get_device_capability()[0],
    )
    calls = [call_of(kernel, head_size, rows) for rows in LOADS[kernel]]
    base = seconds_of(kernel, own, calls)
    best, least = own, float(len(calls))
    for config in candidates(kernel):
        try:
            seconds = seconds_of(kernel, config, calls)
        except OutOfResources:
            continue
        relative = sum(time / base_time for time, base_time in zip(seconds, base, strict=True))
        if relative < least:
            best, least = config, relative
    return {
        "kernel": kernel,
        "head": head_size,
        "table": str(own),
        "fastest": str(best),
        "time": least / len(calls),
    }


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", default=",".join(get_args(Kernel)))
    parser.add_argument("--head-sizes", default="64,128,256")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    require_cuda("benches/python/tune_kernels.py")
    wanted = [
        (kernel, int(head_size))
        for kernel in options.kernels.split(",")
        for head_size in options.head_sizes.split(",")
    ]
    compile_all(wanted)
    for kernel, head_size in wanted:
        row = tune(kernel, head_size)
        report("tuned; time is relative to the table's", row, as_json=options.json)


if __name__ == "__main__":
    main()

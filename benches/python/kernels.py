"""The Triton kernels on a GPU, each beside what the device can do, measured in the same run.

    python benches/python/kernels.py            # a table with the bars and whether each holds
    python benches/python/kernels.py --json

Bytes and operations are counted as the least that the result needs: keys and values read once,
two products a visible pair of query and key.  The L2 cache is flushed before every call, and
medians are reported.  The flushes take longer than the host needs to queue the call: what is
measured is the device alone, as in a CUDA graph.  Swaps are timed from the host, because they run
on a stream of their own.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from measuring import report, report_table
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128
DTYPE = torch.bfloat16
FLUSHED_BYTES = 512 * 2**20
NUM_FLUSHES = 4
COPIED_BYTES = 2**30
PRODUCT_SIZE = 8192
NUM_WARMUPS, NUM_TRIALS = 5, 20
PREFILLED, PREFIX = 8192, 4096
WRITTEN_TOKENS = 65536
COPIED_BLOCKS = 4096
NUM_LAYERS, SWAPPED_BLOCKS = 32, 1024


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement beside its bar; ``share`` is of ``base``'s rate."""

    what: str
    rate: float
    unit: str
    base: str
    share: float
    bar: float | None

    def row(self) -> dict[str, Any]:
        """What is printed."""
        holds = "" if self.bar is None else "yes" if self.share >= self.bar else "NO"
        return {
            "what": self.what,
            "rate": self.rate,
            "unit": self.unit,
            "share": self.share,
            "of": self.base,
            "bar": self.bar,
            "holds": holds,
        }


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reached: bytes and floating-point operations a second."""

    copy: float
    product: float


def device_seconds(call: Callable[[], object]) -> float:
    """The median time of a call on the device, the L2 cache flushed before each."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(NUM_WARMUPS + NUM_TRIALS):
        for _ in range(NUM_FLUSHES):
            flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return float(median(begin.elapsed_time(end) / 1e3 for begin, end in times[NUM_WARMUPS:]))


def host_seconds(call: Callable[[], object]) -> float:
    """The median time from the host's call until the device is idle."""
    times = []
    for _ in range(NUM_WARMUPS):
        torch.cuda.synchronize()
        started = perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(perf_counter() - started)
    return median(times[1:])


def measure_rates() -> Rates:
    """Copying within the device, and a large product of matrices."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.int8, device="cuda")
    destination = torch.empty_like(source)
    x = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=DTYPE, device="cuda")
    return Rates(
        copy=2 * COPIED_BYTES / device_seconds(lambda: destination.copy_(source)),
        product=2 * PRODUCT_SIZE**3 / device_seconds(lambda: x @ x),
    )


def attention_inputs(
    rows: Sequence[tuple[int, int]],
    *,
    head_size: int = HEAD_SIZE,
    dtype: torch.dtype = DTYPE,
    heads_first: bool = False,
) -> dict[str, Any]:
    """Arguments of paged attention for rows of (cached keys, queries), their blocks scattered."""
    lengths = [cached + queries for cached, queries in rows]
    width = -(-max(lengths) // BLOCK_SIZE)
    num_blocks = len(rows) * width
    tables = torch.randperm(num_blocks, device="cuda").int().view(len(rows), width)
    shape = [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, 2 * head_size]
    if heads_first:
        shape[1], shape[2] = shape[2], shape[1]
    pool = torch.empty(shape, dtype=dtype, device="cuda").normal_()
    pool = pool.transpose(1, 2) if heads_first else pool
    queries = [count for _, count in rows]
    starts = [sum(queries[:row]) for row in range(len(rows) + 1)]
    query = torch.randn(starts[-1], NUM_HEADS, head_size, dtype=dtype, device="cuda")
    return {
        "query": query,
        "key_cache": pool[..., :head_size],
        "value_cache": pool[..., head_size:],
        "block_tables": tables,
        "query_start": torch.tensor(starts, dtype=torch.int32, device="cuda"),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "scale": head_size**-0.5,
        "max_query_len": max(queries),
        "max_seq_len": max(lengths),
        "output": torch.empty_like(query),
    }


def kv_bytes(rows: Sequence[tuple[int, int]], *, head_size: int = HEAD_SIZE) -> int:
    """Bytes of all keys and values that rows see."""
    tokens = sum(cached + queries for cached, queries in rows)
    return tokens * NUM_KV_HEADS * 2 * head_size * DTYPE.itemsize


def attention_operations(queries: int, cached: int, *, head_size: int = HEAD_SIZE) -> int:
    """Floating-point operations of a causal chunk: two products, two operations a pair each."""
    pairs = queries * cached + queries * (queries + 1) // 2
    return 4 * NUM_HEADS * head_size * pairs


def measure_decode(rates: Rates) -> list[Figure]:
    """Decode beside the copy bandwidth, and in the other layout of a pool."""
    from pagedserve.kernels.attention import paged_attention

    figures = []
    for batch, context, heads_first, bar in [
        (64, 4096, False, 0.85),
        (64, 4096, True, None),
        (1, 32768, False, 0.70),
        (1, 32768, True, None),
        (64, 512, False, None),
    ]:
        rows = [(context - 1, 1)] * batch
        inputs = attention_inputs(rows, heads_first=heads_first)
        rate = kv_bytes(rows) / device_seconds(partial(paged_attention, **inputs))
        layout = ", heads before slots" if heads_first else ""
        what = f"decode, batch {batch}, context {context}{layout}"
        figures.append(Figure(what, rate / 1e9, "GB/s", "copy", rate / rates.copy, bar))
    return figures


def measure_prefill(rates: Rates) -> list[Figure]:
    """Prefill beside a product of matrices and beside torch's attention on contiguous tensors."""
    from pagedserve.kernels.attention import paged_attention

    figures = []
    for cached, product_bar, torch_bar in [(0, 0.55, 0.9), (PREFIX, None, 0.85)]:
        inputs = attention_inputs([(cached, PREFILLED)])
        operations = attention_operations(PREFILLED, cached)
        rate = operations / device_seconds(partial(paged_attention, **inputs))
        torch_rate = operations / device_seconds(torch_attention(cached))
        what = f"prefill {PREFILLED} over {cached} cached"
        figures += [
            Figure(what, rate / 1e12, "TFLOP/s", "product", rate / rates.product, product_bar),
            Figure(what, rate / 1e12, "TFLOP/s", "torch", rate / torch_rate, torch_bar),
        ]
    return figures


def torch_attention(cached: int) -> Callable[[], Tensor]:
    """Torch's flash attention of the same shape; every query head has keys of its own."""
    query = torch.randn(1, NUM_HEADS, PREFILLED, HEAD_SIZE, dtype=DTYPE, device="cuda")
    key, value = torch.randn(
        2, 1, NUM_HEADS, cached + PREFILLED, HEAD_SIZE, dtype=DTYPE, device="cuda"
    )
    mask = causal_lower_right(PREFILLED, cached + PREFILLED) if cached else None

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None
            )

    return attend


def measure_moves(rates: Rates) -> list[Figure]:
    """Writing new keys and values, and copying blocks, beside the copy bandwidth."""
    from pagedserve.kernels.cache import copy_words, write_cache

    num_blocks = max(2 * COPIED_BLOCKS, WRITTEN_TOKENS // BLOCK_SIZE)
    shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, 2 * HEAD_SIZE)
    pool = torch.zeros(shape, dtype=DTYPE, device="cuda")
    key, value = torch.randn(2, WRITTEN_TOKENS, NUM_KV_HEADS, HEAD_SIZE, dtype=DTYPE, device="cuda")
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:WRITTEN_TOKENS]
    caches = pool[..., :HEAD_SIZE], pool[..., HEAD_SIZE:]
    # No destination is a source, and the pairs are there, as for all layers but the first.
    pairs = torch.randperm(num_blocks, device="cuda")[: 2 * COPIED_BLOCKS].view(-1, 2)
    written = 2 * 2 * key.numel() * DTYPE.itemsize
    copied = 2 * COPIED_BLOCKS * pool[0].numel() * DTYPE.itemsize
    return [
        Figure(what, rate / 1e9, "GB/s", "copy", rate / rates.copy, 0.80)
        for what, rate in [
            (
                f"write {WRITTEN_TOKENS} tokens",
                written / device_seconds(lambda: write_cache(key, value, *caches, slots)),
            ),
            (
                f"copy {COPIED_BLOCKS} blocks",
                copied / device_seconds(lambda: copy_words(pool, pool, pairs)),
            ),
        ]
    ]


def measure_swaps() -> list[Figure]:
    """Swapping scattered blocks of all layers beside one pinned copy of the same bytes."""
    from pagedserve.device import cuda_of
    from pagedserve.kernels.cache import swap_blocks
    from pagedserve.kernels.swap import BlockSwapper

    shape = (SWAPPED_BLOCKS + 64, BLOCK_SIZE, NUM_KV_HEADS, 2 * HEAD_SIZE)
    pools = [torch.zeros(shape, dtype=DTYPE, device="cuda") for _ in range(NUM_LAYERS)]
    swapper = BlockSwapper(pools, shape[0], cuda_of(pools[0].device))
    pairs = torch.stack([torch.randperm(shape[0])[:SWAPPED_BLOCKS] for _ in range(2)], dim=1)
    num_bytes = SWAPPED_BLOCKS * swapper.host[0].numel() * 8
    host = swapper.host[:SWAPPED_BLOCKS]
    device = torch.empty(host.shape, dtype=host.dtype, device="cuda")
    out_rate = num_bytes / host_seconds(lambda: host.copy_(device, non_blocking=True))
    in_rate = num_bytes / host_seconds(lambda: device.copy_(host, non_blocking=True))
    layers = [swapper.host_pool(layer) for layer in range(NUM_LAYERS)]
    pairs_there = pairs.cuda()

    def layer_by_layer(*, is_out: bool) -> None:
        for pool, layer in zip(pools, layers, strict=True):
            swap_blocks(*((pool, layer) if is_out else (layer, pool)), pairs_there)

    return [
        Figure(f"swap {SWAPPED_BLOCKS} blocks {what}", rate / 1e9, "GB/s", base, rate / best, bar)
        for what, base, best, bar, call in [
            ("out", "pinned copy", out_rate, 0.85, lambda: swapper.swap_out(pairs)),
            ("in", "pinned copy", in_rate, 0.85, lambda: swapper.swap_in(pairs)),
            ("out, in place", "pinned copy", out_rate, None, lambda: layer_by_layer(is_out=True)),
            ("in, in place", "pinned copy", in_rate, None, lambda: layer_by_layer(is_out=False)),
        ]
        for rate in [num_bytes / host_seconds(call)]
    ]


def require_cuda(script: str) -> None:
    """End with a line that says why, where there is no CUDA device."""
    if not torch.cuda.is_available():
        sys.exit(f"{script} needs a CUDA device, and torch {torch.__version__} finds none")


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    require_cuda("benches/python/kernels.py")
    import triton

    rates = measure_rates()
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_per_s": rates.copy / 1e9,
        "product_tflops": rates.product / 1e12,
    }
    report("machine", machine, as_json=options.json)
    figures = [
        *measure_decode(rates),
        *measure_prefill(rates),
        *measure_moves(rates),
        *measure_swaps(),
    ]
    report_table("kernels", [figure.row() for figure in figures], as_json=options.json)


if __name__ == "__main__":
    main()

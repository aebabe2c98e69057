"""Production traces through the scheduler alone, under a virtual clock.

mooncake: every request of the hour is computed and finished at once in a cache without limits; the
blocks it finds are counted and compared with what the trace's README says they must be.
azure: real arrivals under memory pressure; what is decided, preempted and waited for.

Prompts of the Azure hours are lengths only, so nothing is shared there and prefix caching is off.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from simulation import Costs, Report, Simulation
from trace_files import AZURE_CODE, AZURE_CONV, MOONCAKE, TOKENS_PER_ID, azure, mooncake, trace

from pagedserve._core import CacheConfig, Scheduler, SchedulerConfig

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 16_384
NUM_CHUNK_TOKENS = 2048
EXPECTED_HITS, EXPECTED_IDS = 105_710, 288_500
PRESSURE = {"code": (AZURE_CODE, (1000, 2000)), "conv": (AZURE_CONV, (2000, 3000, 4000))}
COLUMNS = (
    ("trace", "<7"), ("blocks", ">7"), ("chunks", ">7"), ("steps", ">8"), ("decided/s", ">11"),
    ("recompute", ">10"), ("swap", ">6"), ("again", ">8"), ("ended", ">6"), ("queue p50", ">10"),
    ("p99", ">8"), ("first p50", ">10"), ("p99", ">8"), ("wall", ">7"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hits:
    """What the cache gave to the Mooncake hour."""

    requests: int
    ids: int
    hit_ids: int
    full_hits: int
    prompt_tokens: int
    hit_tokens: int
    seconds: float

    @property
    def us_per_request(self) -> float:
        """Microseconds inside the scheduler for a request."""
        return self.seconds / self.requests * 1e6


class EndlessCache:
    """A scheduler that forgets nothing, one request at a time.

    Every prompt gets one token behind its ids, the same for all: admission computes the last token
    of a prompt in any case, so that without it a hit of the whole prompt would count one too few.
    """

    def __init__(self, *, num_blocks: int, tokens_per_id: int, block_size: int) -> None:
        self._tokens_per_id = tokens_per_id
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1 << 20, max_model_len=1 << 20),
            CacheConfig(
                block_size=block_size,
                num_gpu_blocks=num_blocks,
                watermark=0.0,
                enable_prefix_caching=True,
            ),
        )
        self._last_token = np.full(1, np.iinfo(np.int32).max, dtype=np.int32)
        zeros = np.zeros(1, dtype=np.int32)
        self._answer = (
            zeros,
            np.arange(2, dtype=np.int32),
            zeros,
            np.ones(1, dtype=np.uint8),
        )

    def serve(self, ids: NDArray[np.int32], now: float) -> tuple[int, float]:
        """Compute and finish a request; how many of its ids were there, and seconds."""
        prompt = np.append(np.repeat(ids, self._tokens_per_id), self._last_token)
        started = perf_counter()
        self._scheduler.add_seq_group(prompt, arrival_time=now)
        outputs = self._scheduler.schedule(now)
        self._scheduler.update(outputs.step_id, *self._answer)
        seconds = perf_counter() - started
        return (len(prompt) - outputs.num_batched_tokens) // self._tokens_per_id, seconds


def run_mooncake(folder: Path, *, tokens_per_id: int, block_size: int) -> Hits:
    """The hour in order, every request before the next.

    Raises:
        SystemExit: The hits are not those of the trace's README.
    """
    requests = list(mooncake(trace(folder, MOONCAKE)))
    num_distinct = 1 + max(int(request.ids.max()) for request in requests)
    num_blocks = num_distinct * (tokens_per_id // block_size) + len(requests)
    cache = EndlessCache(num_blocks=num_blocks, tokens_per_id=tokens_per_id, block_size=block_size)
    served = [cache.serve(request.ids, request.arrival) for request in requests]
    pairs = list(zip(requests, (hits for hits, _ in served), strict=True))
    found = Hits(
        requests=len(requests),
        ids=sum(len(request.ids) for request in requests),
        hit_ids=sum(hits for _, hits in pairs),
        full_hits=sum(hits == len(request.ids) for request, hits in pairs),
        prompt_tokens=sum(request.input_length for request in requests),
        hit_tokens=sum(min(hits * TOKENS_PER_ID, request.input_length) for request, hits in pairs),
        seconds=sum(seconds for _, seconds in served),
    )
    if (found.hit_ids, found.ids) != (EXPECTED_HITS, EXPECTED_IDS):
        expected = f"{EXPECTED_HITS:,} of {EXPECTED_IDS:,}"
        raise SystemExit(f"{found.hit_ids:,} of {found.ids:,} ids hit, not {expected}")
    return found


def report_mooncake(options: argparse.Namespace) -> None:
    """Measure and print the Mooncake hour."""
    found = run_mooncake(
        options.traces, tokens_per_id=options.tokens_per_id, block_size=options.block_size
    )
    if options.json:
        row = asdict(found) | {"us_per_request": round(found.us_per_request, 2)}
        print(json.dumps({"trace": "mooncake"} | row), flush=True)
        return
    print(
        f"mooncake: {found.hit_ids:,} of {found.ids:,} ids hit, {found.full_hits} prompts in full;"
        f" {found.hit_tokens:,} of {found.prompt_tokens:,} tokens\n"
        f"{found.requests:,} requests, {options.tokens_per_id} tokens an id in blocks of"
        f" {options.block_size}: {found.seconds:.2f} s, {found.us_per_request:.1f} us a request",
        flush=True,
    )


def run_azure(path: Path, *, num_blocks: int, is_chunked: bool, costs: Costs) -> Report:
    """An Azure hour with so many blocks, prompts whole or cut into chunks."""
    limits = SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=NUM_CHUNK_TOKENS if is_chunked else MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=is_chunked,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks)
    return Simulation(azure(path), limits, cache, costs).run()


def print_azure_row(name: str, num_blocks: int, report: Report, *, is_chunked: bool) -> None:
    """One line of the table."""
    cells = (
        name, f"{num_blocks:,}", "yes" if is_chunked else "no", f"{report.steps:,}",
        f"{report.decisions_per_second:,.0f}", f"{report.recompute_preemptions:,}",
        f"{report.swap_preemptions:,}", f"{report.recomputed_share:.2%}", f"{report.ended}",
        f"{report.queue_p50:.3f}", f"{report.queue_p99:.2f}", f"{report.first_token_p50:.3f}",
        f"{report.first_token_p99:.2f}", f"{report.wall_seconds:.2f}",
    )  # fmt: skip
    widths = (width for _, width in COLUMNS)
    print("".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)


def report_azure(options: argparse.Namespace) -> None:
    """Measure and print both Azure hours."""
    costs = Costs()
    if not options.json:
        print(f"azure, blocks of {BLOCK_SIZE} tokens, {MAX_NUM_SEQS} sequences; {costs};")
        print("again: computed tokens that were given up; times in virtual seconds, wall in real")
        print("".join(f"{name:{width}}" for name, width in COLUMNS))
    for name, (file, sizes) in PRESSURE.items():
        path = trace(options.traces, file)
        for num_blocks in map(int, options.blocks.split(",")) if options.blocks else sizes:
            for is_chunked in (False, True):
                report = run_azure(path, num_blocks=num_blocks, is_chunked=is_chunked, costs=costs)
                if options.json:
                    case = {"trace": name, "blocks": num_blocks, "chunked": is_chunked}
                    print(json.dumps(case | asdict(report)), flush=True)
                else:
                    print_azure_row(name, num_blocks, report, is_chunked=is_chunked)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one trace or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="?", choices=("all", "mooncake", "azure"), default="all")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="the folder")
    parser.add_argument("--blocks", help="sizes of the cache for the Azure hours, by commas")
    parser.add_argument("--tokens-per-id", type=int, default=TOKENS_PER_ID, help="of Mooncake")
    parser.add_argument("--block-size", type=int, default=TOKENS_PER_ID, help="of Mooncake")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    if options.tokens_per_id % options.block_size:
        parser.error("--tokens-per-id must be a multiple of --block-size")
    if options.which in {"all", "mooncake"}:
        report_mooncake(options)
    if options.which in {"all", "azure"}:
        report_azure(options)


if __name__ == "__main__":
    main()

"""What each option of the scheduler gives: every one alone against the classic behaviour.

Loads are those of `workloads.py`, served under a virtual clock.  The first line of a table is the
classic configuration, then it with one option changed at a time, then the defaults; with
--from-defaults the first line is the defaults, and each other line one change of them.  Under
pressure one decision leads to many others, so a line is the mean over several sizes of the cache,
around the one that is named; a change within a few percent is noise.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from simulation import Load, Report, Simulation
from workloads import BLOCK_SIZE, WORKLOADS, Workload

from pagedserve._core import CacheChoices, CacheConfig, SchedulerChoices, SchedulerConfig

MAX_NUM_SEQS = 256
# Fields of `SchedulerConfig`, of its choices and of those of `CacheConfig`.
SCHEDULER_OPTIONS = ("max_num_bypasses", "victim_policy")
SCHEDULER_CHOICES = ("admit_after_preemption", "reverse_swapped_order", "whole_block_chunks")
CACHE_CHOICES = (
    "count_cached_blocks", "charge_cached_tokens", "share_partial_blocks",
    "share_generated_blocks", "swap_in_cached_blocks", "evict_blank_blocks_in_order",
    "exact_append_demand",
)  # fmt: skip
# The values that are tried besides the one of the first line.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "max_num_bypasses": (0, 4, 16, 64),
    "victim_policy": ("last", "least_work"),
    **dict.fromkeys(SCHEDULER_CHOICES + CACHE_CHOICES, (True, False)),
}
COLUMNS = (
    ("", "<42"), ("tokens", ">8"), ("cached", ">8"), ("again", ">8"), ("recomp.", ">8"),
    ("swaps", ">6"), ("moved", ">8"), ("copies", ">7"), ("queue p50", ">10"), ("p99", ">8"),
    ("first p50", ">10"), ("p99", ">8"), ("latency", ">9"), ("p99", ">8"), ("end", ">7"),
)  # fmt: skip

NEEDS_CHUNKS = {"admit_after_preemption", "whole_block_chunks"}
NEEDS_SWAP = {"reverse_swapped_order", "swap_in_cached_blocks"}
NEEDS_CACHE = {"whole_block_chunks", *CACHE_CHOICES} - {"exact_append_demand"}

Values = dict[str, Any]


def limits_of(workload: Workload) -> Values:
    """The limits that no option changes."""
    return {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": workload.num_chunk_tokens or workload.max_model_len,
        "max_model_len": workload.max_model_len,
        "enable_chunked_prefill": workload.num_chunk_tokens is not None,
        "preemption_mode": workload.preemption_mode,
    }


def blocks_of(workload: Workload) -> Values:
    """The blocks that no option changes."""
    return {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks": workload.num_gpu_blocks,
        "num_cpu_blocks": workload.num_cpu_blocks,
        "enable_prefix_caching": workload.prefix_caching,
    }


def options_of(workload: Workload, *, is_classic: bool) -> Values:
    """All options, classic or as they are by default."""
    limits, blocks = limits_of(workload), blocks_of(workload)
    scheduler = SchedulerConfig.classic(**limits) if is_classic else SchedulerConfig(**limits)
    cache = CacheConfig.classic(**blocks) if is_classic else CacheConfig(**blocks)
    values = {name: getattr(scheduler, name) for name in SCHEDULER_OPTIONS}
    values |= {name: getattr(scheduler.choices, name) for name in SCHEDULER_CHOICES}
    return values | {name: getattr(cache.choices, name) for name in CACHE_CHOICES}


def matters(name: str, workload: Workload) -> bool:
    """Whether an option can change anything here."""
    return (
        (workload.prefix_caching or name not in NEEDS_CACHE)
        and (workload.num_chunk_tokens is not None or name not in NEEDS_CHUNKS)
        and (workload.num_cpu_blocks > 0 or name not in NEEDS_SWAP)
    )


def variants(
    workload: Workload, fixed: Values, *, from_defaults: bool
) -> Iterator[tuple[str, Values]]:
    """The first line, each change of it that can matter here, and the other end."""
    first = options_of(workload, is_classic=not from_defaults) | fixed
    yield ("defaults" if from_defaults else "classic") + ", and" * bool(fixed), first
    for name, values in OPTIONS.items():
        for value in values:
            if value != first[name] and matters(name, workload):
                yield f"{name}={value}", first | {name: value}
    if not from_defaults:
        yield "defaults", options_of(workload, is_classic=False)


def run(workload: Workload, load: Load, values: Values) -> Report:
    """Serve the load with these options."""
    options = {name: values[name] for name in SCHEDULER_OPTIONS}
    choices = SchedulerChoices(**{name: values[name] for name in SCHEDULER_CHOICES})
    cache_choices = CacheChoices(**{name: values[name] for name in CACHE_CHOICES})
    return Simulation(
        load,
        SchedulerConfig(**limits_of(workload), **options, choices=choices),
        CacheConfig(**blocks_of(workload), choices=cache_choices),
        workload.costs,
    ).run()


def mean_of(reports: Sequence[Report]) -> Report:
    """Field by field."""
    rows = [asdict(report) for report in reports]
    means: Values = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return Report(**means)


def outcome(report: Report) -> Values:
    """What a run decided and led to, without the real time it took."""
    real = {"scheduler_seconds", "wall_seconds"}
    return {name: value for name, value in asdict(report).items() if name not in real}


def print_row(name: str, report: Report) -> None:
    """One line of the table."""
    cells = (
        name, f"{report.computed_tokens / 1e6:.2f}M", f"{report.cached_tokens / 1e6:.2f}M",
        f"{report.recomputed_share:.2%}", f"{report.recompute_preemptions:,.0f}",
        f"{report.swap_preemptions:,.0f}", f"{report.moved_blocks:,.0f}",
        f"{report.copied_blocks:,.0f}",
        f"{report.queue_p50:.2f}", f"{report.queue_p99:.2f}", f"{report.first_token_p50:.2f}",
        f"{report.first_token_p99:.2f}", f"{report.latency_mean:.2f}", f"{report.latency_p99:.2f}",
        f"{report.virtual_seconds:.0f}",
    )  # fmt: skip
    widths = (width for _, width in COLUMNS)
    print("".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)), flush=True)


def compare(name: str, options: argparse.Namespace) -> None:
    """One table; a change that changes nothing is only named."""
    workload = WORKLOADS[name]
    if options.free_cached_tokens:
        workload = replace(workload, costs=replace(workload.costs, charges_cached=False))
    if not options.json:
        print(f"{name}: {workload.num_gpu_blocks:,} blocks, {workload.costs}")
        print("".join(f"{column:{width}}" for column, width in COLUMNS))
    first: Values | None = None
    without_effect = []
    load = workload.make(options.traces)
    middle = options.sizes // 2
    sizes = [workload.num_gpu_blocks * (1 + (i - middle) / 50) for i in range(options.sizes)]
    sized = [replace(workload, num_gpu_blocks=int(size)) for size in sizes]
    for variant, values in variants(
        workload, dict(options.fixed), from_defaults=options.from_defaults
    ):
        report = mean_of([run(resized, load, values) for resized in sized])
        if options.json:
            row = {"load": name, "variant": variant} | outcome(report)
            print(json.dumps(row), flush=True)
        elif first == outcome(report):
            without_effect.append(variant)
        else:
            print_row(variant, report)
        first = first or outcome(report)
    if without_effect:
        print("the same in everything:", ", ".join(without_effect))


def assignment(text: str) -> tuple[str, Any]:
    """An option and its value out of NAME=VALUE, the value one of those that are tried."""
    name, _, value = text.partition("=")
    tried = {str(choice): choice for choice in OPTIONS.get(name, ())}
    if value not in tried:
        raise argparse.ArgumentTypeError(f"{text}: {name} may be one of {', '.join(tried) or '-'}")
    return name, tried[value]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare on one load or on all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="the folder")
    parser.add_argument("--sizes", type=int, default=5, help="of the cache, two percent apart")
    parser.add_argument("--from-defaults", action="store_true", help="change the defaults instead")
    parser.add_argument(
        "--fix",
        dest="fixed",
        metavar="NAME=VALUE",
        type=assignment,
        action="append",
        default=[],
        help="set an option in the first line, and so in all",
    )
    parser.add_argument(
        "--free-cached-tokens",
        action="store_true",
        help="cached tokens that are charged to the budget are not computed, as in vLLM's runner",
    )
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    for name in options.load or WORKLOADS:
        compare(name, options)


if __name__ == "__main__":
    main()

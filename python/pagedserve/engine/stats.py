"""Counters of an engine, its statistics line, and the clock of its requests."""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, zip_longest
from math import fsum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from pagedserve._core import CacheConfig, Scheduler, SchedulerOutputs
from pagedserve.config import EngineArgs
from pagedserve.executor.memory import MemoryPlan
from pagedserve.host_ops.threads import ThreadWaits

if TYPE_CHECKING:  # `hit_rate` is also for programs without numpy
    from pagedserve.executor.protocol import ModelInfo

_CLOCK_OFFSET: Final = time.time() - time.monotonic()


def request_time() -> float:
    """Seconds since 1970: the wall clock at the start plus a monotonic clock.

    Differences stay correct when the machine's clock is set.  Times for people or other machines,
    such as ``created`` of a response, come from ``time.time`` directly.
    """
    return time.monotonic() + _CLOCK_OFFSET


@dataclass(slots=True)
class Histogram:
    """Distribution of values in buckets.

    Attributes:
        bounds: Largest value of each bucket but the last, increasing.
        counts: Number of values up to each bound and above the previous one; the last is for values
            above all bounds.
        total: Sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        """Initialize the counts to zero."""
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, which occurred this many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """Number of values at most each bound, as Prometheus writes it; the last is all."""
        bounds = [*map(str, map(float, self.bounds)), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))

    def add(self, other: Self) -> None:
        """Add the counts of another with the same bounds."""
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


# Tokens of a step, with vLLM's bounds.
_STEP_TOKENS: Final = (1, *(2**power for power in range(3, 15)))
# 1, 2, 5, 10, 20, ... from 10 microseconds to 50 seconds.
_STEP_SECONDS: Final = tuple(digit / 10**power for power in range(5, -2, -1) for digit in (1, 2, 5))


@dataclass(slots=True)
class EngineStats:
    """Counters over the lifetime of an engine.

    Attributes:
        num_steps: Steps that ran the model.
        num_async_steps: Steps launched before the host knew the tokens of the previous step.
        num_prompt_tokens: Prompt tokens of the requests added.
        num_generation_tokens: New tokens.
        num_computed_prompt_tokens: Prompt tokens that the model computed, including recomputed
            ones.
        num_swapped_blocks: Blocks moved between the device and the host, both ways.
        num_copied_blocks: Blocks copied on write when sequences that shared them diverged.
        peak_used_blocks: Maximum KV blocks in use.
        scheduler_seconds: Seconds spent in the scheduler.
        executor_seconds: Seconds that the executor took to launch steps and return their results.
        num_drafts: Rows of steps with draft tokens.
        num_draft_tokens: Draft tokens that were verified.
        num_accepted_by_place: Draft tokens that were accepted, by their position in the row.
        num_image_queries: Images that steps looked up in the cache of features.
        num_image_hits: Those found there.
        step_tokens: Computed prompt tokens and new tokens of each step that ran the model.
        step_seconds: Duration of each call that ended such a step.
        host_step_seconds: Part of it outside the executor.
    """

    num_steps: int = 0
    num_async_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_swapped_blocks: int = 0
    num_copied_blocks: int = 0
    peak_used_blocks: int = 0
    scheduler_seconds: float = 0.0
    executor_seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_by_place: list[int] = field(default_factory=list)
    num_image_queries: int = 0
    num_image_hits: int = 0
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))
    step_seconds: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS))
    host_step_seconds: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS))

    def record_step(self, scheduled: SchedulerOutputs, num_used_blocks: int) -> None:
        """Count a step that is about to run.

        Args:
            scheduled: Its decisions.
            num_used_blocks: KV blocks in use in it.
        """
        self.num_steps += 1
        self.num_computed_prompt_tokens += scheduled.num_prefill_tokens
        self.peak_used_blocks = max(self.peak_used_blocks, num_used_blocks)
        if scheduled.has_moves:
            self.num_swapped_blocks += len(scheduled.blocks_to_swap_out)
            self.num_swapped_blocks += len(scheduled.blocks_to_swap_in)
            self.num_copied_blocks += len(scheduled.blocks_to_copy)

    def record_tokens(self, scheduled: SchedulerOutputs, num_tokens: int) -> None:
        """Count the tokens of a step that has run.

        Args:
            scheduled: Its decisions.
            num_tokens: New tokens.
        """
        self.num_generation_tokens += num_tokens
        self.step_tokens.observe(scheduled.num_prefill_tokens + num_tokens)

    def record_images(self, num_queries: int, num_hits: int) -> None:
        """Count the images that a step looked up, and those that were found."""
        self.num_image_queries += num_queries
        self.num_image_hits += num_hits

    def record_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the draft tokens of a row, and how many of them were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        counts = self.num_accepted_by_place
        counts += [0] * (num_drafts - len(counts))
        for place in range(num_accepted):
            counts[place] += 1

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that were accepted."""
        return sum(self.num_accepted_by_place)

    @classmethod
    def total(cls, several: Sequence["EngineStats"]) -> "EngineStats":
        """Sum over several engines."""
        total = cls()
        for stats in several:
            for name in cls.__slots__:
                mine, other = getattr(total, name), getattr(stats, name)
                if isinstance(other, Histogram):
                    mine.add(other)
                elif isinstance(other, list):
                    pairs = zip_longest(mine, other, fillvalue=0)
                    setattr(total, name, [number + more for number, more in pairs])
                else:
                    setattr(total, name, mine + other)
        return total


class LoraUsage(NamedTuple):
    """Adapters of unfinished requests.

    Attributes:
        max_loras: Maximum adapters per step.
        running: Names of adapters of running requests.
        waiting: Names of adapters of requests that wait for their first step.
    """

    max_loras: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]

    @classmethod
    def total(cls, usages: Sequence["LoraUsage"]) -> "LoraUsage | None":
        """Sum over several engines; None if none accepts adapters."""
        if not usages:
            return None
        running, waiting = (
            tuple(dict.fromkeys(chain.from_iterable(names)))
            for names in zip(*(usage[1:] for usage in usages), strict=True)
        )
        return cls(usages[0].max_loras, running, waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """State of an engine at one moment: gauges, and counters over its lifetime.

    Attributes:
        num_running: Running requests, whose KV blocks are on the device.
        num_waiting: Requests without KV blocks.
        num_swapped: Requests whose KV blocks are in host memory.
        gpu_cache_usage: Fraction of the KV blocks in use, 0 to 1.
        cpu_cache_usage: Fraction of the host blocks in use, 0 if there are none.
        num_preemptions: Preemptions of requests.
        num_recomputed_tokens: Computed tokens that were dropped.
        num_looked_up_tokens: Tokens looked up in the prefix cache.
        num_cached_tokens: Tokens found in the prefix cache.
        seconds_without_progress: Seconds that requests have waited without a completed step; 0
            without requests.
        cache_config: Configuration of the KV cache, with vLLM's names.
        lora_usage: Adapters in use; None if the engine does not accept adapters.
        has_drafts: Whether speculative decoding is enabled.
        stats: Further counters of the engine, which keep changing.
        threads: What the compute threads of the process have lost to waiting.
        replicas: Snapshots of the replicas by name, if it is their sum; empty for one engine.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    gpu_cache_usage: float
    cpu_cache_usage: float
    num_preemptions: int
    num_recomputed_tokens: int
    num_looked_up_tokens: int
    num_cached_tokens: int
    seconds_without_progress: float
    cache_config: Mapping[str, object]
    lora_usage: LoraUsage | None
    has_drafts: bool
    stats: EngineStats
    threads: ThreadWaits = field(default_factory=ThreadWaits)
    replicas: Mapping[str, "EngineSnapshot"] = field(default_factory=dict)

    @classmethod
    def of(cls, scheduler: Scheduler, **more: Any) -> Self:
        """Create from a scheduler; ``more`` are the fields that it does not have."""
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            gpu_cache_usage=scheduler.gpu_cache_usage,
            cpu_cache_usage=scheduler.cpu_cache_usage,
            num_preemptions=scheduler.num_preemptions,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            num_looked_up_tokens=scheduler.num_looked_up_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            **more,
        )

    @classmethod
    def total(
        cls, replicas: Mapping[str, "EngineSnapshot"], gone: Sequence["EngineSnapshot"] = ()
    ) -> "EngineSnapshot":
        """Aggregate several engines: sums, means of fractions, the longest wait.

        Args:
            replicas: Snapshots of equal engines by name; may be empty.
            gone: Last snapshots of engines that ended, of which only the counters are added.
        """
        snapshots = list(replicas.values()) or [_NOTHING]
        gone = [replace(last, num_running=0, num_waiting=0, num_swapped=0) for last in gone]
        sums = {
            name: sum(getattr(snapshot, name) for snapshot in (*snapshots, *gone))
            for name in cls.__slots__
            if name.startswith("num_")
        }
        usages = [snapshot.lora_usage for snapshot in snapshots]
        return replace(
            snapshots[0],
            **sums,
            gpu_cache_usage=_mean([snapshot.gpu_cache_usage for snapshot in snapshots]),
            cpu_cache_usage=_mean([snapshot.cpu_cache_usage for snapshot in snapshots]),
            seconds_without_progress=max(
                snapshot.seconds_without_progress for snapshot in snapshots
            ),
            lora_usage=LoraUsage.total([usage for usage in usages if usage is not None]),
            stats=EngineStats.total([snapshot.stats for snapshot in (*snapshots, *gone)]),
            threads=ThreadWaits.total(snapshot.threads for snapshot in (*snapshots, *gone)),
            replicas=replicas,
        )


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


_NOTHING: Final = EngineSnapshot(
    num_running=0,
    num_waiting=0,
    num_swapped=0,
    gpu_cache_usage=0.0,
    cpu_cache_usage=0.0,
    num_preemptions=0,
    num_recomputed_tokens=0,
    num_looked_up_tokens=0,
    num_cached_tokens=0,
    seconds_without_progress=0.0,
    cache_config={},
    lora_usage=None,
    has_drafts=False,
    stats=EngineStats(),
)


class Throughput:
    """Tokens per second since the previous measurement."""

    def __init__(self) -> None:
        """Start to measure."""
        self._then = time.monotonic()
        self._counts = (0, 0)

    def age(self) -> float:
        """Seconds since the last measurement."""
        return time.monotonic() - self._then

    def look(self, stats: EngineStats) -> tuple[float, float]:
        """Computed prompt tokens, and new tokens, per second since the last measurement."""
        seconds = max(self.age(), 1e-9)
        counts = (stats.num_computed_prompt_tokens, stats.num_generation_tokens)
        prompt, generation = (
            (count - before) / seconds for count, before in zip(counts, self._counts, strict=True)
        )
        self._then, self._counts = time.monotonic(), counts
        return prompt, generation


class StatsLine:
    """Statistics line of an engine; its rates are since the previous line."""

    def __init__(self) -> None:
        """Start to measure."""
        self._throughput = Throughput()

    def age(self) -> float:
        """Seconds since the last line."""
        return self._throughput.age()

    def write(self, stats: EngineStats, scheduler: Scheduler) -> str:
        """Format the line."""
        prompt, generation = self._throughput.look(stats)
        used = scheduler.gpu_cache_usage
        return (
            f"running {scheduler.num_running}, waiting {scheduler.num_waiting}, "
            f"swapped {scheduler.num_swapped}; KV cache {used:.1%}{hit_rate(scheduler)}"
            f"{acceptance(stats)}; prompt {prompt:.1f}, generation {generation:.1f} tokens/s"
        )


def hit_rate(scheduler: Scheduler) -> str:
    """Fraction of looked up tokens found in the prefix cache; "" if none were looked up."""
    looked_up = scheduler.num_looked_up_tokens
    return f", prefix hits {scheduler.num_cached_tokens / looked_up:.1%}" if looked_up else ""


def acceptance(stats: EngineStats) -> str:
    """Fraction of accepted draft tokens; "" if there were none."""
    drafted = stats.num_draft_tokens
    return f", drafts accepted {stats.num_accepted_tokens / drafted:.1%}" if drafted else ""


def step_line(scheduled: SchedulerOutputs, num_used_blocks: int) -> str:
    """Format a step in one line."""
    return (
        f"step {scheduled.step_id}: {scheduled.num_prefill_groups} prompts, "
        f"{scheduled.num_rows} rows, {scheduled.num_batched_tokens} tokens, "
        f"{num_used_blocks} blocks used"
    )


def cache_config(
    args: EngineArgs, cache: CacheConfig, memory: MemoryPlan, model: "ModelInfo"
) -> dict[str, object]:
    """Configuration of the KV cache, with the names of vLLM's versions."""
    return {
        "block_size": cache.block_size,
        "cache_dtype": args.kv_cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "kv_cache_memory_bytes": memory.pool_bytes,
        "kv_cache_size_tokens": cache.num_gpu_blocks * cache.block_size,
        "num_cpu_blocks": cache.num_cpu_blocks,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "num_gpu_blocks_override": args.num_gpu_blocks,
        "sliding_window": model.group_window if model.group_kind == "window" else None,
        "swap_space_bytes": memory.swap_bytes,
    }

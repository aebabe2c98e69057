"""Counts of an engine, and the line that tells people how it is doing."""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from pagedserve._core import CacheConfig, Scheduler, SchedulerOutputs
from pagedserve.config import EngineArgs
from pagedserve.executor.memory import MemoryPlan

if TYPE_CHECKING:  # `hit_rate` is for programs without numpy too
    from pagedserve.executor.protocol import ModelInfo


@dataclass(slots=True)
class Histogram:
    """Counts by size.

    Attributes:
        bounds: The largest value of each count but the last, increasing.
        counts: How many values there were up to each bound and above the one before; the last is
            of those above all.
        total: Sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        """Begin with nothing."""
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Self) -> None:
        """Count what another with these bounds has counted."""
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


# Tokens of a step, as vLLM counts them.
_STEP_TOKENS: Final = (1, *(2**power for power in range(3, 15)))
# 1, 2, 5, 10, 20, ... from 10 microseconds to 50 seconds.
_STEP_SECONDS: Final = tuple(digit / 10**power for power in range(5, -2, -1) for digit in (1, 2, 5))


@dataclass(slots=True)
class EngineStats:
    """Sums over the life of an engine.

    Attributes:
        num_steps: Steps that ran the model.
        num_async_steps: Those of them that were launched before the tokens of the one before were
            known to the host.
        num_prompt_tokens: Prompt tokens of the requests taken up.
        num_generation_tokens: New tokens.
        num_computed_prompt_tokens: Prompt tokens that the model ran on, again ones included.
        num_swapped_blocks: Blocks moved between the device and the host, both ways.
        num_copied_blocks: Blocks copied because sequences that shared them went apart.
        peak_used_blocks: KV blocks in use at the fullest moment.
        scheduler_seconds: What the scheduler took to decide.
        executor_seconds: What the executor took to launch steps and to give their results.
        num_drafts: Rows of steps that had drafts.
        num_draft_tokens: Drafts that were checked.
        num_accepted_by_place: Those that were right, by their place in their row.
        step_tokens: Tokens of each step that ran the model, drafts included.
        step_seconds: How long each call that ended such a step took.
        host_step_seconds: The part of it outside the executor.
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
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))
    step_seconds: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS))
    host_step_seconds: Histogram = field(default_factory=lambda: Histogram(_STEP_SECONDS))

    def record_step(self, scheduled: SchedulerOutputs, num_used_blocks: int) -> None:
        """Count a step about to run.

        Args:
            scheduled: Its decisions.
            num_used_blocks: KV blocks in use in it.
        """
        self.num_steps += 1
        self.step_tokens.observe(scheduled.num_batched_tokens)
        self.num_computed_prompt_tokens += scheduled.num_prefill_tokens
        self.peak_used_blocks = max(self.peak_used_blocks, num_used_blocks)
        if scheduled.has_moves:
            self.num_swapped_blocks += len(scheduled.blocks_to_swap_out)
            self.num_swapped_blocks += len(scheduled.blocks_to_swap_in)
            self.num_copied_blocks += len(scheduled.blocks_to_copy)

    def record_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a row, and how many of them were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        counts = self.num_accepted_by_place
        counts += [0] * (num_drafts - len(counts))
        for place in range(num_accepted):
            counts[place] += 1

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(self.num_accepted_by_place)

    @classmethod
    def total(cls, several: Sequence["EngineStats"]) -> "EngineStats":
        """The sums of several engines."""
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
    """Which adapters unfinished requests have.

    Attributes:
        max_loras: Adapters of a step.
        running: Names of those that a step has computed something with.
        waiting: Names of those of requests that wait for their first step.
    """

    max_loras: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]

    @classmethod
    def total(cls, usages: Sequence["LoraUsage"]) -> "LoraUsage | None":
        """Of several engines; None where none takes any."""
        if not usages:
            return None
        running, waiting = (
            tuple(dict.fromkeys(chain.from_iterable(names)))
            for names in zip(*(usage[1:] for usage in usages), strict=True)
        )
        return cls(usages[0].max_loras, running, waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """An engine at one moment: gauges, and sums over its life.

    Attributes:
        num_running: Requests whose KV blocks are where the model computes.
        num_waiting: Requests without KV blocks.
        num_swapped: Requests whose KV blocks are in host memory.
        gpu_cache_usage: Share of the KV blocks that are used, 0 to 1.
        cpu_cache_usage: Share of the blocks in host memory, 0 where there are none.
        num_preemptions: Requests that gave their place to others.
        num_recomputed_tokens: Tokens that were computed and given up.
        num_looked_up_tokens: Tokens that the prefix cache was asked for.
        num_cached_tokens: Those of them that it had.
        seconds_without_progress: How long requests have waited without the end of a step; 0 while
            there are none.
        cache_config: How the KV cache was made, by vLLM's names.
        lora_usage: Of adapters; None where the engine takes none.
        has_drafts: Whether next tokens are guessed.
        stats: The engine's other sums, which go on.
        replicas: The engines that it is the sum of, by name; none where it is one.
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
    replicas: Mapping[str, "EngineSnapshot"] = field(default_factory=dict)

    @classmethod
    def of(cls, scheduler: Scheduler, memory: MemoryPlan, **more: Any) -> Self:
        """What a scheduler says of itself; ``more`` are the fields that it does not know."""
        num_cpu_blocks = memory.num_cpu_blocks
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_swapped=scheduler.num_swapped,
            gpu_cache_usage=1 - scheduler.num_free_gpu_blocks / memory.num_gpu_blocks,
            cpu_cache_usage=(
                1 - scheduler.num_free_cpu_blocks / num_cpu_blocks if num_cpu_blocks else 0.0
            ),
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
        """Several engines as one: sums, means of shares, the longest wait.

        Args:
            replicas: Engines that were made alike, by name; none is one that does nothing.
            gone: The last ones of engines that are no more, of which sums are left.
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
            gpu_cache_usage=fmean(snapshot.gpu_cache_usage for snapshot in snapshots),
            cpu_cache_usage=fmean(snapshot.cpu_cache_usage for snapshot in snapshots),
            seconds_without_progress=max(
                snapshot.seconds_without_progress for snapshot in snapshots
            ),
            lora_usage=LoraUsage.total([usage for usage in usages if usage is not None]),
            stats=EngineStats.total([snapshot.stats for snapshot in (*snapshots, *gone)]),
            replicas=replicas,
        )


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
    """Tokens a second, between one look and the next."""

    def __init__(self) -> None:
        """Begin to measure."""
        self._then = time.monotonic()
        self._counts = (0, 0)

    def age(self) -> float:
        """Seconds since the last look."""
        return time.monotonic() - self._then

    def look(self, stats: EngineStats) -> tuple[float, float]:
        """Prompt tokens that the model ran on, and new tokens, a second since the last look."""
        seconds = max(self.age(), 1e-9)
        counts = (stats.num_computed_prompt_tokens, stats.num_generation_tokens)
        prompt, generation = (
            (count - before) / seconds for count, before in zip(counts, self._counts, strict=True)
        )
        self._then, self._counts = time.monotonic(), counts
        return prompt, generation


class StatsLine:
    """One readable line about an engine; its rates are those since the line before."""

    def __init__(self) -> None:
        """Begin to measure."""
        self._throughput = Throughput()

    def age(self) -> float:
        """Seconds since the last line."""
        return self._throughput.age()

    def write(self, stats: EngineStats, scheduler: Scheduler, num_gpu_blocks: int) -> str:
        """The line.

        Args:
            stats: The engine's counts.
            scheduler: Its scheduler.
            num_gpu_blocks: Its KV blocks.
        """
        prompt, generation = self._throughput.look(stats)
        used = 1 - scheduler.num_free_gpu_blocks / num_gpu_blocks
        return (
            f"running {scheduler.num_running}, waiting {scheduler.num_waiting}, "
            f"swapped {scheduler.num_swapped}; KV cache {used:.1%}{hit_rate(scheduler)}"
            f"{acceptance(stats)}; prompt {prompt:.1f}, generation {generation:.1f} tokens/s"
        )


def hit_rate(scheduler: Scheduler) -> str:
    """The share of looked up tokens that the prefix cache had; "" where nothing was looked up."""
    looked_up = scheduler.num_looked_up_tokens
    return f", prefix hits {scheduler.num_cached_tokens / looked_up:.1%}" if looked_up else ""


def acceptance(stats: EngineStats) -> str:
    """The share of drafts that were right; "" where there were none."""
    drafted = stats.num_draft_tokens
    return f", drafts accepted {stats.num_accepted_tokens / drafted:.1%}" if drafted else ""


def step_line(scheduled: SchedulerOutputs, num_used_blocks: int) -> str:
    """One step in one line."""
    return (
        f"step {scheduled.step_id}: {scheduled.num_prefill_groups} prompts, "
        f"{scheduled.num_rows} rows, {scheduled.num_batched_tokens} tokens, "
        f"{num_used_blocks} blocks used"
    )


def cache_config(
    args: EngineArgs, cache: CacheConfig, memory: MemoryPlan, model: "ModelInfo"
) -> dict[str, object]:
    """How the KV cache was made, by the names that vLLM's versions have for it."""
    return {
        "block_size": cache.block_size,
        "cache_dtype": "auto",  # the model's
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "kv_cache_memory_bytes": memory.pool_bytes,
        "kv_cache_size_tokens": cache.num_gpu_blocks * cache.block_size,
        "num_cpu_blocks": cache.num_cpu_blocks,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "num_gpu_blocks_override": args.num_gpu_blocks,
        "sliding_window": model.sliding_window,
        "swap_space_bytes": memory.swap_bytes,
    }

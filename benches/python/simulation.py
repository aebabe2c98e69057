"""A scheduler driven by a load under a virtual clock: no model, no waiting.

The clock moves by what a step would cost, as `Costs` says, and jumps where nothing is to do.
Everything else is the real thing: requests arrive, `schedule`, `prepare_inputs` and `update` are
called as an engine calls them, and each sampled sequence goes on until it has its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import (
    CacheConfig,
    InputBuffers,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
)

# Steps in a row without anything done before a run is called stalled.
PATIENCE = 1000
TOKEN_MODULUS = 2_147_483_629


@dataclass(frozen=True, slots=True)
class Load:
    """N requests in order of arrival."""

    arrivals: NDArray[np.float64]  # [N], seconds from 0
    prompts: Sequence[NDArray[np.int32]]
    num_outputs: NDArray[np.int64]  # [N], tokens that each of its samples generates
    num_samples: int = 1  # sequences of every request, forked at the first token


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that a step takes: at least `step`, and more for what it holds."""

    step: float = 0.015
    token: float = 0.000_05
    row: float = 0.000_02
    moved_block: float = 0.000_4
    charges_cached: bool = True  # whether a token whose keys lie in the cache costs like others

    def __str__(self) -> str:
        free = "" if self.charges_cached else " not cached"
        return (
            f"a step takes {self.step * 1e3:g} ms + {self.token * 1e3:g} ms a token{free}"
            f" + {self.row * 1e3:g} ms a row + {self.moved_block * 1e3:g} ms a block swapped"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a run; times are virtual seconds unless they say otherwise."""

    requests: int
    steps: int
    decisions: int
    recompute_preemptions: int
    swap_preemptions: int
    ended: int
    computed_tokens: int
    cached_tokens: int  # of the computed ones: keys and values lay in the cache already
    recomputed_share: float
    moved_blocks: int
    copied_blocks: int
    queue_p50: float
    queue_p99: float
    first_token_p50: float
    first_token_p99: float
    latency_mean: float
    latency_p99: float
    virtual_seconds: float
    scheduler_seconds: float  # real: inside the scheduler's calls
    wall_seconds: float  # real: the whole run

    @property
    def decisions_per_second(self) -> float:
        """Decisions in a second inside the scheduler."""
        return self.decisions / self.scheduler_seconds


def token_at(seqs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """The output token of a sequence at a position: a fixed function, hardly ever the same."""
    return ((seqs * 1_000_003 + positions * 7919 + 11) % TOKEN_MODULUS).astype(np.int32)


class Simulation:
    """One scheduler and one load.

    Sequence `i * n + k` of the load is sample `k` of request `i`, where each has `n`.
    """

    def __init__(
        self,
        load: Load,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        costs: Costs,
    ) -> None:
        self._load = load
        self._costs = costs
        self._scheduler = Scheduler(scheduler_config, cache_config)
        self._make_buffers(scheduler_config, cache_config)
        num_requests = len(load.prompts)
        self._limits = np.repeat(load.num_outputs, load.num_samples)
        self._produced = np.zeros_like(self._limits)
        self._first_scheduled = np.full(num_requests, np.nan)
        self._first_token = np.full(num_requests, np.nan)
        self._finished = np.full(num_requests, np.nan)
        self._seq_of: dict[int, int] = {}
        self._last_handles = np.zeros(0, dtype=np.int64)
        self._seqs = np.zeros(0, dtype=np.int64)
        self._now = 0.0
        self._num_added = self._num_idle = 0
        self._steps = self._decisions = self._num_tokens = self._num_ended = 0
        self._num_cached = self._num_moved = self._num_copied = 0
        self._has_cache = cache_config.enable_prefix_caching
        self._preemptions = {"recompute": 0, "swap": 0}
        self._scheduler_seconds = 0.0

    def _make_buffers(self, limits: SchedulerConfig, cache: CacheConfig) -> None:
        num_tokens, num_rows = limits.max_num_batched_tokens, limits.max_num_seqs
        num_blocks = limits.max_model_len // cache.block_size + 2
        self._sample_rows = np.zeros(num_rows, dtype=np.int32)
        self._row_handles = np.zeros(num_rows, dtype=np.int64)
        self._slots = np.zeros(num_tokens, dtype=np.int64)
        self._buffers = InputBuffers(
            token_ids=np.zeros(num_tokens, dtype=np.int32),
            positions=np.zeros(num_tokens, dtype=np.int64),
            slot_mapping=self._slots,
            query_start=np.zeros(num_rows + 1, dtype=np.int32),
            seq_lens=np.zeros(num_rows, dtype=np.int32),
            block_tables=np.zeros(num_rows * num_blocks, dtype=np.int32),
            sample_index=np.zeros(num_rows, dtype=np.int32),
            sample_rows=self._sample_rows,
            row_handles=self._row_handles,
        )

    def run(self) -> Report:
        """Serve the whole load.

        Raises:
            RuntimeError: The scheduler does nothing any more although work waits.
        """
        started = perf_counter()
        while self._num_added < len(self._load.prompts) or self._scheduler.has_unfinished:
            self._add_arrived()
            entered = perf_counter()
            outputs = self._scheduler.schedule(self._now)
            if not outputs.is_empty:
                self._scheduler.prepare_inputs(self._buffers)
            self._scheduler_seconds += perf_counter() - entered
            self._count(outputs)
            if outputs.is_empty:
                self._skip(outputs)
            else:
                self._execute(outputs)
        return self._report(perf_counter() - started)

    def _add_arrived(self) -> None:
        arrivals, n = self._load.arrivals, self._load.num_samples
        while self._num_added < len(arrivals) and arrivals[self._num_added] <= self._now:
            request = self._num_added
            prompt, arrival = self._load.prompts[request], float(arrivals[request])
            entered = perf_counter()
            _, seq = self._scheduler.add_seq_group(
                prompt, arrival_time=arrival, max_num_running_seqs=n
            )
            self._scheduler_seconds += perf_counter() - entered
            self._seq_of[seq] = request * n + n - 1  # a parent keeps its handle, and is last
            self._num_added += 1

    def _count(self, outputs: SchedulerOutputs) -> None:
        preempted, ended = outputs.preempted, outputs.ignored_seq_groups
        for _, mode in preempted:
            self._preemptions[mode] += 1
        self._num_ended += len(ended)
        self._steps += 1
        self._decisions += outputs.num_rows + len(preempted) + len(ended) + len(outputs.refused)
        self._num_tokens += outputs.num_batched_tokens

    def _skip(self, outputs: SchedulerOutputs) -> None:
        if outputs.preempted or outputs.ignored_seq_groups:
            self._num_idle = 0
            return
        self._num_idle += 1
        if self._num_idle > PATIENCE:
            waiting = self._scheduler.num_waiting + self._scheduler.num_swapped
            raise RuntimeError(f"stalled at {self._now:.3f} s: {waiting} groups wait")
        if self._num_added < len(self._load.arrivals):
            self._now = max(self._now, float(self._load.arrivals[self._num_added]))
        else:
            self._now += self._costs.step

    def _execute(self, outputs: SchedulerOutputs) -> None:
        self._num_idle = 0
        self._identify(self._row_handles[: outputs.num_rows])
        num_moved = num_cached = 0
        if outputs.has_moves:
            num_moved = len(outputs.blocks_to_swap_in) + len(outputs.blocks_to_swap_out)
            self._num_copied += len(outputs.blocks_to_copy)
        num_tokens = outputs.num_batched_tokens
        if self._has_cache:
            num_cached = int(np.count_nonzero(self._slots[:num_tokens] < 0))
        self._num_moved += num_moved
        self._num_cached += num_cached
        costs = self._costs
        num_charged = num_tokens if costs.charges_cached else num_tokens - num_cached
        self._now += costs.step + costs.token * num_charged
        self._now += costs.row * outputs.num_rows + costs.moved_block * num_moved
        self._answer(outputs)

    def _identify(self, handles: NDArray[np.int64]) -> None:
        if np.array_equal(handles, self._last_handles):
            return
        self._last_handles = handles.copy()
        self._seqs = np.array([self._seq_of[handle] for handle in handles.tolist()], dtype=np.int64)
        requests = self._seqs // self._load.num_samples
        new = requests[np.isnan(self._first_scheduled[requests])]
        self._first_scheduled[new] = self._now

    def _answer(self, outputs: SchedulerOutputs) -> None:
        parents = self._sample_rows[: outputs.num_samples]
        seqs = self._seqs[parents]
        if self._load.num_samples > 1:
            parents, seqs = self._spread(parents, seqs)
        self._produced[seqs] += 1
        produced = self._produced[seqs]
        finish = (produced >= self._limits[seqs]).astype(np.uint8)
        starts = np.arange(len(seqs) + 1, dtype=np.int32)
        tokens = token_at(seqs, produced)
        entered = perf_counter()
        handles, _ = self._scheduler.update(outputs.step_id, parents, starts, tokens, finish)
        self._scheduler_seconds += perf_counter() - entered
        if self._load.num_samples > 1:
            self._seq_of.update(zip(handles.tolist(), seqs.tolist(), strict=True))
        self._first_token[seqs[produced == 1] // self._load.num_samples] = self._now
        self._finished[seqs[finish != 0] // self._load.num_samples] = self._now

    def _spread(
        self, parents: NDArray[np.int32], seqs: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Sequences without an output become all the samples of their request."""
        n = self._load.num_samples
        counts = np.where(self._produced[seqs] == 0, n, 1)
        ends = np.cumsum(counts)
        behind = np.repeat(ends, counts) - 1 - np.arange(ends[-1] if len(ends) else 0)
        return np.repeat(parents, counts).astype(np.int32), np.repeat(seqs, counts) - behind

    def _report(self, wall_seconds: float) -> Report:
        arrivals = self._load.arrivals
        queue = percentiles(self._first_scheduled - arrivals)
        first = percentiles(self._first_token - arrivals)
        latency = self._finished - arrivals
        given_up = self._scheduler.num_recomputed_tokens
        return Report(
            requests=len(arrivals),
            steps=self._steps,
            decisions=self._decisions,
            recompute_preemptions=self._preemptions["recompute"],
            swap_preemptions=self._preemptions["swap"],
            ended=self._num_ended,
            computed_tokens=self._num_tokens,
            cached_tokens=self._num_cached,
            moved_blocks=self._num_moved,
            copied_blocks=self._num_copied,
            recomputed_share=given_up / max(1, self._num_tokens),
            queue_p50=queue[0],
            queue_p99=queue[1],
            first_token_p50=first[0],
            first_token_p99=first[1],
            latency_mean=float(np.nanmean(latency)),
            latency_p99=percentiles(latency)[1],
            virtual_seconds=self._now,
            scheduler_seconds=self._scheduler_seconds,
            wall_seconds=wall_seconds,
        )


def percentiles(times: NDArray[np.float64]) -> tuple[float, float]:
    """The median and the 99th percentile of those that are known."""
    p50, p99 = np.nanpercentile(times, (50, 99))
    return float(p50), float(p99)

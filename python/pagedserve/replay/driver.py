"""Engine of a scenario: a fake model on the real scheduler, one row of decisions per step.

Owns an engine's state outside the scheduler: the branch of a sequence, and the length of its
output. Costs only the scheduler's time and a JSON object per step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedserve._core import CacheConfig, Scheduler, SchedulerConfig, SchedulerOutputs
from pagedserve.replay.scenario import (
    Scenario,
    ScenarioConfig,
    ScenarioError,
    ScenarioRequest,
    output_token,
)

_SECONDS_A_STEP = 0.01
# Consecutive steps that schedule and end nothing, after which the run counts as stalled.
_STALL_STEPS = 60

_TOTALS = (
    "steps",
    "finished",
    "ignored",
    "recompute",
    "swap_out",
    "swap_in",
    "copies",
    "tokens",
    "aborted",
    "empty_steps",
)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Output:
    """One sample of a step, before the scheduler knows it."""

    row: int
    parent: int
    branch: int
    token: int
    length: int
    is_finished: bool


@dataclass(slots=True)
class _Branch:
    """A running sequence: its branch number and its output length."""

    number: int
    length: int


@dataclass(slots=True)
class _Group:
    """A running request: its sequences by handle, and the number of the next branch."""

    request: ScenarioRequest
    branches: dict[int, _Branch]
    next_branch: int


class ScenarioDriver:
    """Runs a scenario on a scheduler of the classic configuration."""

    def __init__(self, scenario: Scenario) -> None:
        """Create the scheduler.

        Raises:
            ConfigError: An invalid configuration.
        """
        self._scenario = scenario
        try:
            self.scheduler = _classic_scheduler(scenario.config)
        except TypeError as error:
            text = ", ".join([str(error), *getattr(error, "__notes__", ())])
            raise ScenarioError(f"config: {text}") from error
        self._groups: dict[int, _Group] = {}
        self._ids: dict[int, str] = {}
        self._handles: dict[str, int] = {}
        self._totals = dict.fromkeys(_TOTALS, 0)

    def rows(self) -> Iterator[Row]:
        """Rows of the run: one per step with work, and the totals at the end."""
        step, num_idle = 0, 0
        while True:
            self._arrive(step)
            if not self.scheduler.has_unfinished:
                if step >= self._scenario.last_step:
                    break
                step += 1
                continue
            row = self._step(step)
            yield row
            num_idle = 0 if row["scheduled"] or row["ignored"] else num_idle + 1
            if num_idle == _STALL_STEPS and step >= self._scenario.last_step:
                break
            step += 1
        yield {"end": self._end("stalled" if self.scheduler.has_unfinished else "done")}

    def _arrive(self, step: int) -> None:
        for request in self._scenario.requests:
            if request.step == step:
                group, seq = self.scheduler.add_seq_group(
                    request.prompt,
                    arrival_time=request.arrival_time,
                    max_num_running_seqs=request.best_of,
                    priority=request.priority,
                    adapter=request.lora_int_id,
                )
                self._groups[group] = _Group(request, {seq: _Branch(0, 0)}, request.best_of)
                self._ids[group] = request.id
                self._handles[request.id] = group
        for request_id in self._scenario.aborts.get(step, ()):
            group = self._handles.get(request_id, -1)
            self.scheduler.abort(group)
            self._totals["aborted"] += 1
            self._groups.pop(group, None)

    def _step(self, step: int) -> Row:
        outputs = self.scheduler.schedule(step * _SECONDS_A_STEP)
        row = self._decisions(step, outputs)
        for group, _, _ in outputs.ignored_seq_groups:
            self._groups.pop(group, None)
        finished = [] if outputs.is_empty else self._update(outputs)
        row["finished"] = [self._ids[group] for group in finished]
        row["after"] = {"queues": self._queue_sizes(), "free": self._free()}
        self._count(row)
        return row

    def _decisions(self, step: int, outputs: SchedulerOutputs) -> Row:
        scheduled = outputs.scheduled_seq_groups
        preempted = outputs.preempted
        row: Row = {
            "step": step,
            "scheduled": [
                [
                    self._ids[scheduled_group.group],
                    scheduled_group.token_chunk_size,
                    scheduled_group.is_prefill,
                    scheduled_group.is_sampled,
                    len(self.scheduler.seqs_of(scheduled_group.group)),
                ]
                for scheduled_group in scheduled
            ],
            "num_batched_tokens": outputs.num_batched_tokens,
            "num_prefill_groups": outputs.num_prefill_groups,
            "preempted_recompute": [self._ids[g] for g, mode in preempted if mode == "recompute"],
            "preempted_swap": [self._ids[g] for g, mode in preempted if mode == "swap"],
            "swapped_in": [self._ids[group] for group in outputs.swapped_in],
            "n_swap_in": len(outputs.blocks_to_swap_in),
            "n_swap_out": len(outputs.blocks_to_swap_out),
            "n_copy": len(outputs.blocks_to_copy),
            "ignored": [self._ids[group] for group, _, _ in outputs.ignored_seq_groups],
            "queues": self._queue_sizes(),
            "free": self._free(),
        }
        if self._scenario.config.enable_prefix_caching:
            row["common_computed"] = {
                self._ids[scheduled_group.group]: len(
                    self.scheduler.common_computed_blocks(scheduled_group.group)
                )
                for scheduled_group in scheduled
                if scheduled_group.is_prefill
            }
        if self._scenario.records_queues:
            row["queue_ids"] = self._queue_ids()
        blocks = {
            "in": outputs.blocks_to_swap_in.tolist(),
            "out": outputs.blocks_to_swap_out.tolist(),
            "copy": outputs.blocks_to_copy.tolist(),
        }
        return row | ({"blocks": blocks} if any(blocks.values()) else {})

    def _update(self, outputs: SchedulerOutputs) -> list[int]:
        """Sample, update the scheduler, and return the groups that ended."""
        samples: list[_Output] = []
        first_row = 0
        for scheduled in outputs.scheduled_seq_groups:
            if scheduled.is_sampled:
                samples.extend(self._sample(scheduled.group, first_row))
            first_row += scheduled.num_rows
        handles, _ = self.scheduler.update(
            outputs.step_id,
            np.array([sample.row for sample in samples], dtype=np.int32),
            np.arange(len(samples) + 1, dtype=np.int32),
            np.array([sample.token for sample in samples], dtype=np.int32),
            np.array([sample.is_finished for sample in samples], dtype=np.uint8),
        )
        groups = [
            scheduled_group.group
            for scheduled_group in outputs.scheduled_seq_groups
            if scheduled_group.is_sampled
        ]
        self._follow(samples, handles.tolist(), groups)
        ended = [group for group in groups if not self._groups[group].branches]
        for group in ended:
            del self._groups[group]
        return ended

    def _sample(self, handle: int, first_row: int) -> Iterator[_Output]:
        group = self._groups[handle]
        request = group.request
        seqs = self.scheduler.seqs_of(handle).tolist()
        for offset, (seq, num_samples) in enumerate(
            zip(seqs, _num_samples(group, seqs), strict=True)
        ):
            branch = group.branches[seq]
            is_first = branch.length == 0
            for sample in range(num_samples):
                is_parent = sample == num_samples - 1
                number = branch.number
                if is_first:
                    number = sample
                elif not is_parent:
                    number = group.next_branch
                    group.next_branch += 1
                token = output_token(request.out_seed, number, branch.length)
                length = branch.length + 1
                is_finished = self._is_finished(request, number, length)
                yield _Output(first_row + offset, seq, number, token, length, is_finished)

    def _is_finished(self, request: ScenarioRequest, branch: int, length: int) -> bool:
        lens = request.output_lens
        planned = lens[0] if request.use_beam_search else lens[min(branch, len(lens) - 1)]
        max_model_len = self._scenario.config.max_model_len
        return length >= planned or len(request.prompt) + length > max_model_len

    def _follow(self, samples: list[_Output], handles: list[int], groups: list[int]) -> None:
        """Keep the sequences that the scheduler keeps."""
        of_seq = {seq: group for group in groups for seq in self._groups[group].branches}
        after: dict[int, dict[int, _Branch]] = {group: {} for group in groups}
        for sample, seq in zip(samples, handles, strict=True):
            if not sample.is_finished:
                after[of_seq[sample.parent]][seq] = _Branch(sample.branch, sample.length)
        for group, branches in after.items():
            self._groups[group].branches = branches

    def _queue_sizes(self) -> list[int]:
        return [
            self.scheduler.num_waiting,
            self.scheduler.num_running,
            self.scheduler.num_swapped,
        ]

    def _queue_ids(self) -> list[list[str]]:
        queues = (self.scheduler.waiting, self.scheduler.running, self.scheduler.swapped)
        return [[self._ids[group] for group in queue] for queue in queues]

    def _free(self) -> list[int]:
        return [self.scheduler.num_free_gpu_blocks, self.scheduler.num_free_cpu_blocks]

    def _count(self, row: Row) -> None:
        counted = {
            "steps": 1,
            "finished": len(row["finished"]),
            "ignored": len(row["ignored"]),
            "recompute": len(row["preempted_recompute"]),
            "swap_out": len(row["preempted_swap"]),
            "swap_in": len(row["swapped_in"]),
            "copies": row["n_copy"],
            "tokens": row["num_batched_tokens"],
            "empty_steps": int(not row["scheduled"]),
        }
        for key, value in counted.items():
            self._totals[key] += value

    def _end(self, reason: str) -> Row:
        return self._totals | {"end": reason, "left": self._queue_ids(), "free": self._free()}


def _num_samples(group: _Group, seqs: list[int]) -> list[int]:
    """Number of samples of each running sequence."""
    request = group.request
    first = group.branches[seqs[0]]
    if first.length == 0:
        return [request.best_of]
    counts = [1] * len(seqs)
    branches_now = (first.length + request.ordinal) % request.beam_period == 0
    if request.use_beam_search and len(seqs) > 1 and branches_now:
        counts[0], counts[-1] = 2, 0
    return counts


def _classic_scheduler(config: ScenarioConfig) -> Scheduler:
    return Scheduler(
        SchedulerConfig.classic(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            preemption_mode=config.preemption_mode,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy=config.policy,
            delay_factor=config.delay_factor,
            max_loras=config.max_loras,
        ),
        CacheConfig.classic(
            block_size=config.block_size,
            num_gpu_blocks=config.num_gpu_blocks,
            num_cpu_blocks=config.num_cpu_blocks,
            watermark=config.watermark,
            enable_prefix_caching=config.enable_prefix_caching,
            sliding_window=config.sliding_window,
        ),
    )

"""Schedulers that are driven at random, with all that an engine may do, and write decision logs."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagedserve import (
    CacheConfig,
    InputBuffers,
    KVGroup,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
)
from pagedserve._core import CacheChoices, SchedulerChoices

MAX_ROWS, MAX_TOKENS, MAX_MODEL_LEN, BLOCK_SIZE = 12, 64, 96, 4
NUM_STEPS = 150

CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "chunked": ({"enable_chunked_prefill": True, "max_num_bypasses": 3}, {"num_cpu_blocks": 30}),
    "cached": ({}, {"enable_prefix_caching": True}),
    "cached in chunks": ({"enable_chunked_prefill": True}, {"enable_prefix_caching": True}),
    "ahead": ({"num_lookahead_slots": 3}, {"num_cpu_blocks": 20}),
    "ahead and cached": ({"num_lookahead_slots": 5}, {"enable_prefix_caching": True}),
    "priority": ({"policy": "priority", "victim_policy": "least_work"}, {"num_cpu_blocks": 9}),
    "adapters": ({"max_loras": 2, "delay_factor": 8.0}, {"enable_prefix_caching": True}),
    "swap": ({"preemption_mode": "swap", "max_num_bypasses": 2}, {"num_cpu_blocks": 60}),
    "recompute": ({"preemption_mode": "recompute"}, {}),
    "as vLLM": (
        {"choices": SchedulerChoices.classic(), "enable_chunked_prefill": True},
        {"choices": CacheChoices.classic(), "enable_prefix_caching": True, "num_cpu_blocks": 30},
    ),
    "window": ({}, {"sliding_window": 10, "num_cpu_blocks": 30}),
    "window group": (
        {"num_lookahead_slots": 1},
        {"groups": [KVGroup("window", window=9, num_gpu_blocks=90, num_cpu_blocks=20)]}
        | {"num_cpu_blocks": 30},
    ),
    "window group and cached": (
        {"enable_chunked_prefill": True},
        {"groups": [KVGroup("window", window=9, num_gpu_blocks=60, num_cpu_blocks=20)]}
        | {"num_cpu_blocks": 30, "enable_prefix_caching": True},
    ),
    "sink tokens": (
        {"enable_chunked_prefill": True, "num_lookahead_slots": 1},
        {
            "groups": [
                KVGroup("window", window=9, num_sink_tokens=6, num_gpu_blocks=70, num_cpu_blocks=20)
            ],
            "num_cpu_blocks": 30,
            "enable_prefix_caching": True,
        },
    ),
    "attention chunks": (
        {"preemption_mode": "swap"},
        {
            "groups": [KVGroup("chunked", window=16, num_gpu_blocks=90, num_cpu_blocks=20)],
            "num_cpu_blocks": 30,
            "enable_prefix_caching": True,
        },
    ),
    "states": (
        {},
        {"groups": [KVGroup("state", num_gpu_blocks=12, num_cpu_blocks=5)], "num_cpu_blocks": 30},
    ),
    "encoders and windows": (
        {"enable_chunked_prefill": True},
        {
            "groups": [KVGroup("cross"), KVGroup("window", window=9, num_gpu_blocks=60)],
            "num_cpu_blocks": 30,
            "enable_prefix_caching": True,
        },
    ),
}

# What a line says of its step.
DECISIONS = (
    "scheduled",
    "preempted",
    "swapped_in",
    "moves",
    "group_moves",
    "adapters_to_load",
    "ignored",
    "refused",
    "free",
)


def decisions(scheduler: Scheduler, step: SchedulerOutputs) -> dict[str, Any]:
    """What the line of a step has to say of it."""
    moves = [[len(of.swap_out), len(of.swap_in), len(of.copy)] for of in step.moves]
    return {
        "step": step.step_id,
        "scheduled": [
            [entry.group, entry.token_chunk_size, entry.is_prefill, entry.num_rows]
            for entry in step.scheduled_seq_groups
        ],
        "preempted": [list(pair) for pair in step.preempted],
        "swapped_in": step.swapped_in,
        "moves": moves[0],
        "group_moves": moves[1:],
        "adapters_to_load": [list(load) for load in step.adapters_to_load],
        "ignored": [[group, reason] for group, reason, _ in step.ignored_seq_groups],
        "refused": [list(pair) for pair in step.refused],
        "free": [scheduler.num_free_gpu_blocks, scheduler.num_free_cpu_blocks],
    }


class RandomEngine:
    """Does whatever an engine may do, in an order that follows from a seed."""

    def __init__(self, options: str, seed: int, log: Path, **log_options: int) -> None:
        for_scheduler, for_cache = CONFIGURATIONS[options]
        self.rng = random.Random(f"{options} {seed}")
        self.config = SchedulerConfig(
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            **for_scheduler,
        )
        cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=40, **for_cache)
        self.scheduler = Scheduler(self.config, cache, log=log, **log_options)
        self.row_handles = np.zeros(MAX_ROWS, np.int64)
        of_rows = ("seq_lens", "sample_index", "sample_rows", "adapter_slots", "cross_lens")
        groups = for_cache.get("groups", [])
        self.has_encoders = any(group.kind == "cross" for group in groups)
        self.buffers = InputBuffers(
            token_ids=np.zeros(MAX_TOKENS, np.int32),
            positions=np.zeros(MAX_TOKENS, np.int64),
            slot_mapping=np.zeros(MAX_TOKENS, np.int64),
            query_start=np.zeros(MAX_ROWS + 1, np.int32),
            block_tables=np.zeros(MAX_ROWS * MAX_MODEL_LEN, np.int32),
            group_tables=[np.zeros(MAX_ROWS * MAX_MODEL_LEN, np.int32) for _ in groups],
            group_slots=[np.zeros(MAX_TOKENS, np.int64) for _ in groups],
            row_handles=self.row_handles,
            **{name: np.zeros(MAX_ROWS, np.int32) for name in of_rows},
        )
        # Of each group how many sequences it asked for, and how many were ever made.
        self.asked: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.seen: list[dict[str, Any]] = []
        # The step that was ended before its tokens were known.
        self.unresolved: SchedulerOutputs | None = None
        self.now = 0.0

    def run(self) -> None:
        self.live()
        self.scheduler.flush_log()
        assert self.scheduler.log_error is None

    def live(self) -> None:
        for _ in range(NUM_STEPS):
            while self.rng.random() < 0.4:
                self.add()
            self.maybe_abort()
            if self.rng.random() < 0.05:
                self.scheduler.reset_prefix_cache()
            self.now += self.rng.choice([0.0, 0.01, 1 / 3])
            step = self.scheduler.schedule(self.now)
            self.seen.append(decisions(self.scheduler, step))
            if self.resolve() and not step.is_empty:
                self.finish(step)
            self.scheduler.check()
        self.scheduler.schedule(self.now)  # writes down what was done since the last step

    def add(self) -> None:
        rng = self.rng
        # Few first tokens, so that prefixes are met again; now and then too long a prompt.
        length = rng.choice([1, 5, 20, 30, 63, 64, 110 if rng.random() < 0.1 else 8])
        token_ids = np.arange(length, dtype=np.int32) + rng.randrange(3)
        asked = rng.choice([1, 1, 1, 2, 4])
        salt = rng.choice([0, 0, 0, 2**64 - 1])
        num_branches = rng.choice([0, 0, rng.randint(1, asked)])
        branches = [
            np.array(rng.choices(range(3), k=rng.randrange(4)), dtype=np.int32)
            for _ in range(num_branches)
        ]
        group, _ = self.scheduler.add_seq_group(
            token_ids,
            arrival_time=self.now - rng.random() / 20,
            max_num_running_seqs=asked,
            priority=rng.randrange(-2, 3),
            adapter=rng.randrange(4) if self.config.max_loras else 0,
            salt=salt,
            num_encoder_tokens=rng.choice([0, 9]) if salt and self.has_encoders else 0,
            branches=branches,
        )
        self.asked[group], self.made[group] = asked, len(branches) or 1

    def maybe_abort(self) -> None:
        if self.asked and self.rng.random() < 0.1:
            self.scheduler.abort(self.rng.choice(list(self.asked)))

    def resolve(self) -> bool:
        """Name the tokens of the unresolved step; False if it failed, and with it the next."""
        step, self.unresolved = self.unresolved, None
        if step is None:
            return True
        if self.rng.random() < 0.1:
            self.scheduler.abandon(step.step_id)
            return False
        tokens = [self.rng.randrange(5) for _ in range(step.num_samples)]
        self.scheduler.resolve_tokens(step.step_id, np.array(tokens, np.int32))
        return True

    def finish(self, step: SchedulerOutputs) -> None:
        self.maybe_abort()
        if self.rng.random() < 0.5 and self.scheduler.update_async(step.step_id):
            self.unresolved = step
            return
        if self.rng.random() < 0.05:
            self.scheduler.abandon(step.step_id)
            return
        self.scheduler.prepare_inputs(self.buffers)
        parents, starts, tokens, finish = [], [0], [], []
        for parent, own_tokens, is_finished in self.outputs(step):
            parents.append(parent)
            tokens.extend(own_tokens)
            starts.append(len(tokens))
            finish.append(is_finished)
        self.scheduler.update(
            step.step_id,
            np.array(parents, np.int32),
            np.array(starts, np.int32),
            np.array(tokens, np.int32),
            np.array(finish, np.uint8),
        )

    def outputs(self, step: SchedulerOutputs) -> Iterator[tuple[int, list[int], bool]]:
        row = 0
        for entry in step.scheduled_seq_groups:
            if entry.is_sampled:
                limit = self.asked[entry.group]
                if self.made[entry.group] >= limit:
                    limit = len(self.scheduler.seqs_of(entry.group))
                for own_row in range(row, row + entry.num_rows):
                    for output in self.outputs_of(own_row, step, limit):
                        limit -= not output[2]
                        yield output
            row += entry.num_rows

    def outputs_of(
        self, row: int, step: SchedulerOutputs, limit: int
    ) -> Iterator[tuple[int, list[int], bool]]:
        rng, seq = self.rng, int(self.row_handles[row])
        group = next(handle for handle in self.asked if self.holds(handle, seq))
        num_outputs = rng.choices([0, 1, 2, 3], [1, 20, 3, 1])[0]
        self.made[group] += max(0, num_outputs - 1)
        num_tokens = 1
        if num_outputs == 1 and row >= step.num_prefill_rows:
            num_tokens = rng.randint(1, 1 + step.num_lookahead_slots)
        is_long = len(self.scheduler.token_ids(seq)) + num_tokens > MAX_MODEL_LEN
        for _ in range(num_outputs):
            is_finished = is_long or limit <= 0 or rng.random() < 0.05
            limit -= not is_finished
            yield row, [rng.randrange(5) for _ in range(num_tokens)], is_finished

    def holds(self, group: int, seq: int) -> bool:
        try:
            return seq in self.scheduler.seqs_of(group).tolist()
        except LookupError:
            return False

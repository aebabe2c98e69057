"""What the scheduler costs a step: the three border calls while N sequences decode.

Only `schedule`, `prepare_inputs` and `update` are timed; the arrays that answer a step are made
beforehand, as an engine's sampler would hand them over.  A figure is the median over the steps.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import CacheConfig, InputBuffers, Scheduler, SchedulerConfig

BLOCK_SIZE = 16
WARMUP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What a fake model answers to a step: one token for each of N rows."""

    parent_rows: NDArray[np.int32]
    token_start: NDArray[np.int32]
    tokens: NDArray[np.int32]
    finish: NDArray[np.uint8]

    @classmethod
    def of(cls, rows: NDArray[np.int32]) -> "Answer":
        """Continue each of these rows with token 1."""
        return cls(
            parent_rows=rows,
            token_start=np.arange(len(rows) + 1, dtype=np.int32),
            tokens=np.ones(len(rows), dtype=np.int32),
            finish=np.zeros(len(rows), dtype=np.uint8),
        )


@dataclass(frozen=True, slots=True)
class Split:
    """Median microseconds of a step and of its three calls."""

    total: float
    schedule: float
    prepare_inputs: float
    update: float


class Decoding:
    """N sequences past their prompts, each with a block table of its own."""

    def __init__(self, num_seqs: int, *, prompt_len: int, max_model_len: int) -> None:
        max_num_blocks = -(-max_model_len // BLOCK_SIZE)
        max_num_tokens = max(num_seqs, 16 * prompt_len)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=num_seqs,
                max_num_batched_tokens=max_num_tokens,
                max_model_len=max_model_len,
            ),
            CacheConfig(
                block_size=BLOCK_SIZE,
                num_gpu_blocks=num_seqs * max_num_blocks + 16,
                watermark=0.0,
            ),
        )
        self._sample_rows = np.zeros(num_seqs, dtype=np.int32)
        self._buffers = InputBuffers(
            token_ids=np.zeros(max_num_tokens, dtype=np.int32),
            positions=np.zeros(max_num_tokens, dtype=np.int64),
            slot_mapping=np.zeros(max_num_tokens, dtype=np.int64),
            query_start=np.zeros(num_seqs + 1, dtype=np.int32),
            seq_lens=np.zeros(num_seqs, dtype=np.int32),
            block_tables=np.zeros(num_seqs * max_num_blocks, dtype=np.int32),
            sample_index=np.zeros(num_seqs, dtype=np.int32),
            sample_rows=self._sample_rows,
            row_handles=np.zeros(num_seqs, dtype=np.int64),
        )
        self._answer = Answer.of(np.arange(num_seqs, dtype=np.int32))
        self._prefill(num_seqs, prompt_len)

    def _prefill(self, num_seqs: int, prompt_len: int) -> None:
        for seq in range(num_seqs):
            prompt = np.full(prompt_len, seq, dtype=np.int32)
            self._scheduler.add_seq_group(prompt, arrival_time=0.0)
        while self._scheduler.num_waiting:
            outputs = self._scheduler.schedule(0.0)
            self._scheduler.prepare_inputs(self._buffers)
            answer = Answer.of(self._sample_rows[: outputs.num_samples].copy())
            self._update(outputs.step_id, answer)

    def _update(self, step_id: int, answer: Answer) -> None:
        self._scheduler.update(
            step_id, answer.parent_rows, answer.token_start, answer.tokens, answer.finish
        )

    def step(self) -> tuple[int, int, int]:
        """One decode step; nanoseconds of schedule, prepare_inputs and update."""
        started = perf_counter_ns()
        outputs = self._scheduler.schedule(1.0)
        scheduled = perf_counter_ns()
        self._scheduler.prepare_inputs(self._buffers)
        prepared = perf_counter_ns()
        self._update(outputs.step_id, self._answer)
        updated = perf_counter_ns()
        if outputs.num_samples != len(self._answer.tokens):
            raise RuntimeError(f"{outputs.num_samples} rows, not {len(self._answer.tokens)}")
        return scheduled - started, prepared - scheduled, updated - prepared


def measure(num_seqs: int, *, context: int, num_steps: int) -> Split:
    """Time decode steps around a context of `context` tokens (half before it, half after)."""
    steps = WARMUP_STEPS + num_steps
    prompt_len = max(1, context - steps // 2)
    decoding = Decoding(num_seqs, prompt_len=prompt_len, max_model_len=prompt_len + steps + 2)
    for _ in range(WARMUP_STEPS):
        decoding.step()
    gc.disable()
    times = [decoding.step() for _ in range(num_steps)]
    gc.enable()
    calls = [statistics.median(call) / 1e3 for call in zip(*times, strict=True)]
    return Split(statistics.median(map(sum, times)) / 1e3, *calls)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each N and print a table, or one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ns", default="1,16,64,256,1024", help="numbers of sequences, by commas")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=200, help="timed steps for each N")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    if not options.json:
        print("microseconds a step, median")
        print(f"{'N':>6}{'total':>10}{'schedule':>10}{'prepare':>10}{'update':>10}")
    for num_seqs in map(int, options.ns.split(",")):
        split = measure(num_seqs, context=options.context, num_steps=options.steps)
        if options.json:
            us = round(split.total, 2)
            print(json.dumps({"n": num_seqs, "prefix_caching": False, "us": us}), flush=True)
        else:
            figures = (split.total, split.schedule, split.prepare_inputs, split.update)
            print(f"{num_seqs:>6}" + "".join(f"{us:>10.2f}" for us in figures), flush=True)


if __name__ == "__main__":
    main()

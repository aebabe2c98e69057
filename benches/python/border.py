"""What the scheduler costs: the three border calls while N sequences decode, and admission.

Decode: only `schedule`, `prepare_inputs` and `update` are timed; the arrays that answer a step are
made beforehand, as an engine's sampler would hand them over.  The lengths of the sequences are
spread over a block, so that every step maps and registers its share of new blocks; with
--equal-lengths, as in the peer's bench, the median step does neither.  A figure is the median over
the steps, of the best of the repetitions, which alternate between the settings.

With --window N a second KV group keeps a window of N tokens, as in models with such layers beside
others: each step then does everything for two groups.

With --admission: `add_seq_group` of every request and the `schedule` that admits them all, prefix
caching on and the hashing of the prompts included; the median over the repetitions.
"""

import argparse
import gc
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from pagedserve._core import (
    CacheConfig,
    InputBuffers,
    KVGroup,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
)

BLOCK_SIZE = 16
WARMUP_STEPS = 20
PREFIX_LEN = 2048
COLUMNS = ("total", "schedule", "prepare", "update", "a seq")


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
class Setting:
    """Prefix caching, and the window of a second KV group, if there is one."""

    prefix_caching: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Median microseconds of a step and of its three calls."""

    total: float
    schedule: float
    prepare_inputs: float
    update: float


class Decoding:
    """N sequences past their prompts, each with a block table of its own."""

    def __init__(
        self,
        num_seqs: int,
        *,
        prompt_len: int,
        max_model_len: int,
        setting: Setting,
        equal_lengths: bool,
    ) -> None:
        max_num_blocks = -(-max_model_len // BLOCK_SIZE)
        max_num_tokens = max(num_seqs, 16 * prompt_len)
        config = SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max_num_tokens,
            max_model_len=max_model_len,
        )
        groups = [] if setting.window is None else [window_group(config, setting.window, num_seqs)]
        self._scheduler = Scheduler(
            config,
            CacheConfig(
                block_size=BLOCK_SIZE,
                num_gpu_blocks=num_seqs * max_num_blocks + 16,
                watermark=0.0,
                enable_prefix_caching=setting.prefix_caching,
                groups=groups,
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
            group_tables=[np.zeros(num_seqs * max_num_blocks, dtype=np.int32) for _ in groups],
            group_slots=[np.zeros(max_num_tokens, dtype=np.int64) for _ in groups],
        )
        self._answer = Answer.of(np.arange(num_seqs, dtype=np.int32))
        self._prefill(num_seqs, prompt_len, spread=1 if equal_lengths else BLOCK_SIZE)

    def _prefill(self, num_seqs: int, prompt_len: int, *, spread: int) -> None:
        for seq in range(num_seqs):
            prompt = np.full(max(1, prompt_len - seq % spread), seq, dtype=np.int32)
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


def window_group(config: SchedulerConfig, window: int, num_seqs: int) -> KVGroup:
    """A KV group with as many blocks as all sequences can need."""
    num_blocks = KVGroup.num_gpu_blocks_for(
        config, window=window, block_size=BLOCK_SIZE, num_seqs=num_seqs
    )
    return KVGroup("window", window=window, num_gpu_blocks=2 * num_blocks)


def measure(
    num_seqs: int,
    *,
    context: int,
    num_steps: int,
    setting: Setting = Setting(),
    equal_lengths: bool = False,
) -> Split:
    """Time decode steps around a context of `context` tokens (half before it, half after)."""
    steps = WARMUP_STEPS + num_steps
    prompt_len = max(1, context + BLOCK_SIZE // 2 - steps // 2)
    decoding = Decoding(
        num_seqs,
        prompt_len=prompt_len,
        max_model_len=prompt_len + steps + 2,
        setting=setting,
        equal_lengths=equal_lengths,
    )
    for _ in range(WARMUP_STEPS):
        decoding.step()
    gc.disable()
    times = [decoding.step() for _ in range(num_steps)]
    gc.enable()
    calls = [statistics.median(call) / 1e3 for call in zip(*times, strict=True)]
    return Split(statistics.median(map(sum, times)) / 1e3, *calls)


class Admitting:
    """A scheduler with prefix caching, room for every prompt in one step, and known contents."""

    def __init__(self, *, num_gpu_blocks: int, num_seqs: int) -> None:
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=num_seqs, max_num_batched_tokens=1 << 21, max_model_len=8192
            ),
            CacheConfig(
                block_size=BLOCK_SIZE,
                num_gpu_blocks=num_gpu_blocks,
                watermark=0.0,
                enable_prefix_caching=True,
            ),
        )

    def finish(self, prompts: Sequence[NDArray[np.int32]]) -> None:
        """Compute prompts and end them: their blocks stay behind as cached ones."""
        outputs = self._admit(prompts)
        answer = Answer.of(np.arange(len(prompts), dtype=np.int32))
        self._scheduler.update(
            outputs.step_id,
            answer.parent_rows,
            answer.token_start,
            answer.tokens,
            np.ones(len(prompts), dtype=np.uint8),
        )

    def time(self, prompts: Sequence[NDArray[np.int32]], *, num_tokens: int) -> float:
        """Microseconds a prompt until all are admitted; `num_tokens` of them are not cached."""
        gc.disable()
        started = perf_counter_ns()
        outputs = self._admit(prompts)
        elapsed = perf_counter_ns() - started
        gc.enable()
        if (outputs.num_rows, outputs.num_batched_tokens) != (len(prompts), num_tokens):
            raise RuntimeError(f"{outputs.num_rows} rows, {outputs.num_batched_tokens} tokens")
        return elapsed / len(prompts) / 1e3

    def _admit(self, prompts: Sequence[NDArray[np.int32]]) -> SchedulerOutputs:
        for prompt in prompts:
            self._scheduler.add_seq_group(prompt, arrival_time=0.0)
        return self._scheduler.schedule(0.0)


def random_prompts(num_prompts: int, num_tokens: int) -> list[NDArray[np.int32]]:
    """Prompts that have nothing in common, the same ones each time."""
    random = np.random.default_rng(num_prompts)
    return list(random.integers(0, 1 << 20, (num_prompts, num_tokens), dtype=np.int32))


def admit_over_prefix(num_requests: int, own_len: int) -> float:
    """Microseconds a request: all share a cached prefix and add tokens of their own."""
    (prefix,) = random_prompts(1, PREFIX_LEN)
    admitting = Admitting(num_gpu_blocks=60_000, num_seqs=2048)
    admitting.finish([np.append(prefix, np.arange(20, dtype=np.int32))])
    prompts = [np.append(prefix, own) for own in random_prompts(num_requests, own_len)]
    return admitting.time(prompts, num_tokens=num_requests * own_len)


def admit_unseen(num_prompts: int, num_gpu_blocks: int) -> float:
    """Microseconds a prompt: each takes its blocks from a cache in which none is blank."""
    admitting = Admitting(num_gpu_blocks=num_gpu_blocks, num_seqs=2048)
    num_full, num_left = divmod(num_gpu_blocks * BLOCK_SIZE, PREFIX_LEN)
    prompts = random_prompts(num_full + 1 + num_prompts, PREFIX_LEN)
    filling, unseen = prompts[: num_full + 1], prompts[num_full + 1 :]
    filling[-1] = filling[-1][:num_left]
    admitting.finish([prompt for prompt in filling if len(prompt)])
    return admitting.time(unseen, num_tokens=num_prompts * PREFIX_LEN)


def report_admission(num_repeats: int, *, as_json: bool) -> None:
    """Measure and print both cases of admission."""
    cases = {
        "prefix": [admit_over_prefix(256, 64) for _ in range(num_repeats)],
        "unseen": [admit_unseen(16, 10_000) for _ in range(num_repeats)],
    }
    texts = {
        "prefix": "256 requests, cached prefix of 2,048 tokens and 64 of their own",
        "unseen": "16 unseen prompts of 2,048 tokens, all 10,000 blocks cached",
    }
    for case, times in cases.items():
        us, least = statistics.median(times), min(times)
        if as_json:
            row = {"case": case, "us": round(us, 2), "least_us": round(least, 2)}
            print(json.dumps(row), flush=True)
        else:
            print(f"{texts[case]}: {us:.2f} us each (least {least:.2f})", flush=True)


def best_of(num_seqs: int, settings: Sequence[Setting], options: argparse.Namespace) -> list[Split]:
    """The best repetition of each setting, measured in turn."""
    runs = [
        [
            measure(
                num_seqs,
                context=options.context,
                num_steps=options.steps,
                setting=setting,
                equal_lengths=options.equal_lengths,
            )
            for setting in settings
        ]
        for _ in range(options.repeat)
    ]
    return [min(splits, key=lambda split: split.total) for splits in zip(*runs, strict=True)]


def report_decode(options: argparse.Namespace) -> None:
    """Measure each N and print a table, or one JSON object a line."""
    cached = (False, True) if options.prefix_caching else (False,)
    windows = (None,) if options.window is None else (None, options.window)
    settings = [Setting(*pair) for pair in itertools.product(cached, windows)]
    if not options.json:
        print("microseconds a step, median")
        print(f"{'N':>6}{'cached':>8}{'groups':>8}" + "".join(f"{name:>10}" for name in COLUMNS))
    for num_seqs in map(int, options.ns.split(",")):
        for setting, split in zip(settings, best_of(num_seqs, settings, options), strict=True):
            if options.json:
                row = {"n": num_seqs, **asdict(setting), "us": round(split.total, 2)}
                print(json.dumps(row), flush=True)
                continue
            calls = (split.schedule, split.prepare_inputs, split.update)
            figures = (split.total, *calls, split.total / num_seqs)
            row_text = "".join(f"{us:>10.2f}" for us in figures[:-1]) + f"{figures[-1]:>10.4f}"
            shown = f"{'yes' if setting.prefix_caching else 'no':>8}{1 + bool(setting.window):>8}"
            print(f"{num_seqs:>6}{shown}{row_text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure decode, or with --admission admission."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ns", default="1,16,64,256,1024,4096", help="sequences, by commas")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=200, help="timed steps for each N")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions (admission: ten times)")
    parser.add_argument("--prefix-caching", action="store_true", help="decode without and with it")
    parser.add_argument("--window", type=int, help="decode without and with a window's group")
    parser.add_argument("--equal-lengths", action="store_true", help="no spread over a block")
    parser.add_argument("--admission", action="store_true", help="admission instead of decode")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    if options.admission:
        report_admission(10 * options.repeat, as_json=options.json)
    else:
        report_decode(options)


if __name__ == "__main__":
    main()

"""Bytes of a sequence of 32,768 tokens in two models' shapes, by the block tables of a scheduler.

A token of a layer takes ``2 * Hkv * D * 2`` bytes: a key and a value of each head, two bytes an
element.  With L tokens in the sequence and S in a step, a sequence takes

    full layers * L + layers with a window W * (W + S)    while a step runs, W between steps
    full layers * L + layers with chunks of C * C         while a step runs, C - S between steps

where S divides C; else a step that crosses a chunk's end has up to C + S there.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from pagedserve import CacheConfig, KVGroup, Scheduler, SchedulerConfig

NUM_TOKENS, STEP, BLOCK_SIZE, NUM_NEW = 32_768, 2048, 16, 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Layers of a model, and the kind of the KV group of those that do not keep everything."""

    num_full: int
    num_bounded: int
    num_kv_heads: int
    head_size: int
    kind: str
    window: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_size * 2

    def num_bytes(self, full: int, bounded: int) -> int:
        """Bytes of so many tokens in the full layers and in the others."""
        return (self.num_full * full + self.num_bounded * bounded) * self.token_bytes


GPT_OSS_20B = Shape(
    num_full=12, num_bounded=12, num_kv_heads=8, head_size=64, kind="window", window=128
)
LLAMA4_SCOUT = Shape(
    num_full=12, num_bounded=36, num_kv_heads=8, head_size=128, kind="chunked", window=8192
)


def most_bytes(shape: Shape, step_size: int, *, caches_prefixes: bool) -> tuple[int, int]:
    """Most bytes of a sequence while a step runs, and between steps."""
    limits = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=step_size,
        max_model_len=NUM_TOKENS + NUM_NEW,
        enable_chunked_prefill=True,
    )
    least = KVGroup.num_gpu_blocks_for(limits, window=shape.window, block_size=BLOCK_SIZE)
    group = KVGroup(shape.kind, window=shape.window, num_gpu_blocks=least)  # type: ignore[arg-type]
    cache = CacheConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=NUM_TOKENS // BLOCK_SIZE + 30,
        groups=[group],
        enable_prefix_caching=caches_prefixes,
    )
    scheduler = Scheduler(limits, cache)
    _, seq = scheduler.add_seq_group(np.arange(NUM_TOKENS, dtype=np.int32), arrival_time=0.0)

    def taken() -> int:
        full, bounded = (len(scheduler.block_table(seq, kv_group=index)) for index in range(2))
        return shape.num_bytes(full * BLOCK_SIZE, bounded * BLOCK_SIZE)

    in_step, between = [], []
    while len(scheduler.token_ids(seq)) < NUM_TOKENS + NUM_NEW:
        step = scheduler.schedule(0.0)
        in_step.append(taken())
        rows = np.zeros(step.num_samples, np.int32)
        scheduler.update(
            step.step_id,
            rows,
            np.arange(len(rows) + 1, dtype=np.int32),
            rows,
            rows.astype(np.uint8),
        )
        between.append(taken())
        scheduler.check()
    return max(in_step), max(between)


@pytest.mark.parametrize("caches_prefixes", [False, True])
@pytest.mark.parametrize("shape", [GPT_OSS_20B, LLAMA4_SCOUT], ids=["gpt-oss-20b", "Llama 4 Scout"])
def test_a_long_sequence_takes_what_its_layers_see(shape: Shape, caches_prefixes: bool) -> None:
    in_step, between = most_bytes(shape, STEP, caches_prefixes=caches_prefixes)
    kept = shape.window if shape.kind == "window" else shape.window - STEP
    assert in_step == pytest.approx(shape.num_bytes(NUM_TOKENS, kept + STEP), rel=0.02)
    assert between == pytest.approx(shape.num_bytes(NUM_TOKENS, kept), rel=0.02)
    assert in_step < 0.55 * shape.num_bytes(NUM_TOKENS, NUM_TOKENS), "of one table for all layers"


def test_a_step_across_chunks_takes_a_chunk_and_the_step_at_most() -> None:
    shape, step_size = LLAMA4_SCOUT, 3000
    in_step, between = most_bytes(shape, step_size, caches_prefixes=False)
    assert between <= 1.02 * shape.num_bytes(NUM_TOKENS, shape.window)
    most = shape.num_bytes(NUM_TOKENS, shape.window + step_size)
    assert between < in_step <= 1.02 * most

"""A small engine around the scheduler: arrays of its own, and steps that say what they computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from pagedserve import (
    CacheConfig,
    InputBuffers,
    KVGroup,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
)

MAX_ROWS, MAX_TOKENS, MAX_LEN = 8, 64, 64
SIZES = {
    "token_ids": MAX_TOKENS,
    "positions": MAX_TOKENS,
    "slot_mapping": MAX_TOKENS,
    "query_start": MAX_ROWS + 1,
    "seq_lens": MAX_ROWS,
    "block_tables": MAX_ROWS * MAX_LEN,
    "sample_index": MAX_ROWS,
    "sample_rows": MAX_ROWS,
    "row_handles": MAX_ROWS,
    "adapter_slots": MAX_ROWS,
    "cross_lens": MAX_ROWS,
}
WIDE = {"positions", "slot_mapping", "row_handles"}
# Groups of a busy scheduler.
GROUPS = (KVGroup("window", window=6, num_gpu_blocks=60), KVGroup("cross"))


def make_arrays() -> dict[str, Any]:
    """Arrays for any step, filled with what no step writes."""
    return {
        name: np.full(size, -9, np.int64 if name in WIDE else np.int32)
        for name, size in SIZES.items()
    }


def make_group_arrays(num_groups: int) -> dict[str, Any]:
    """Likewise for the KV groups beside the first."""
    return {
        "group_tables": [np.full(MAX_ROWS * MAX_LEN, -9, np.int32) for _ in range(num_groups)],
        "group_slots": [np.full(MAX_TOKENS, -9, np.int64) for _ in range(num_groups)],
    }


@dataclass(frozen=True)
class RowInputs:
    """What one row of a step computes."""

    seq: int
    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    num_keys: int
    table: list[int]
    is_sampled: bool
    adapter_slot: int
    group_tables: list[list[int]]
    group_slots: list[list[int]]


class Engine:
    """A scheduler of few blocks of 4 tokens, and the calls of a step in short."""

    def __init__(
        self,
        for_scheduler: dict[str, Any] | None = None,
        for_cache: dict[str, Any] | None = None,
        *,
        is_classic: bool = False,
    ) -> None:
        make_limits = SchedulerConfig.classic if is_classic else SchedulerConfig
        make_cache = CacheConfig.classic if is_classic else CacheConfig
        limits = {
            "max_num_seqs": MAX_ROWS,
            "max_num_batched_tokens": MAX_TOKENS,
            "max_model_len": MAX_LEN,
        }
        cache = {"block_size": 4, "num_gpu_blocks": 16}
        self.scheduler = Scheduler(
            make_limits(**limits | (for_scheduler or {})),
            make_cache(**cache | (for_cache or {})),
        )
        self.arrays = make_arrays()
        self.group_arrays = make_group_arrays(len((for_cache or {}).get("groups", ())))
        self.buffers = InputBuffers(**self.arrays, **self.group_arrays)
        self.now = 0.0

    def add(self, prompt: int | Sequence[int], **options: Any) -> tuple[int, int]:
        """Queue a prompt, or one of that many tokens that no other prompt of its length has."""
        token_ids = range(100, 100 + prompt) if isinstance(prompt, int) else prompt
        given = {"arrival_time": self.now} | options
        return self.scheduler.add_seq_group(np.array(token_ids, np.int32), **given)

    def schedule(self) -> SchedulerOutputs:
        self.now += 1.0
        outputs = self.scheduler.schedule(self.now)
        self.scheduler.check()
        return outputs

    def inputs(self, outputs: SchedulerOutputs) -> list[RowInputs]:
        self.scheduler.prepare_inputs(self.buffers)
        of = {name: array.tolist() for name, array in self.arrays.items()}
        width = outputs.max_num_blocks
        sampled = of["sample_rows"][: outputs.num_samples]
        rows = []
        for row in range(outputs.num_rows):
            span = slice(of["query_start"][row], of["query_start"][row + 1])
            rows.append(
                RowInputs(
                    seq=of["row_handles"][row],
                    token_ids=of["token_ids"][span],
                    positions=of["positions"][span],
                    slots=of["slot_mapping"][span],
                    num_keys=of["seq_lens"][row],
                    table=of["block_tables"][row * width : (row + 1) * width],
                    is_sampled=row in sampled,
                    adapter_slot=of["adapter_slots"][row],
                    group_tables=[
                        tables[row * wide : (row + 1) * wide].tolist()
                        for tables, wide in zip(
                            self.group_arrays["group_tables"], outputs.table_widths, strict=True
                        )
                    ],
                    group_slots=[
                        slots[span].tolist() for slots in self.group_arrays["group_slots"]
                    ],
                )
            )
        return rows

    def update(
        self, outputs: SchedulerOutputs, results: Sequence[tuple[int, Sequence[int], bool]]
    ) -> list[int]:
        """End the step; a result is its row, its tokens and whether it is the last."""
        lengths = [len(tokens) for _, tokens, _ in results]
        handles, _ = self.scheduler.update(
            outputs.step_id,
            np.array([row for row, _, _ in results], np.int32),
            np.cumsum([0, *lengths], dtype=np.int32),
            np.array([token for _, tokens, _ in results for token in tokens], np.int32),
            np.array([is_finished for _, _, is_finished in results], np.uint8),
        )
        self.scheduler.check()
        seqs: list[int] = handles.tolist()
        return seqs

    def step(self, token: int = 7) -> tuple[SchedulerOutputs, list[RowInputs]]:
        """One step; each sampled row gets ``token`` and lives on."""
        outputs = self.schedule()
        if outputs.is_empty:
            return outputs, []
        rows = self.inputs(outputs)
        sampled = [index for index, row in enumerate(rows) if row.is_sampled]
        self.update(outputs, [(index, [token], False) for index in sampled])
        return outputs, rows

    def refuses(
        self,
        error: type[Exception],
        message: str,
        call: Callable[..., object],
        *args: Any,
        **options: Any,
    ) -> None:
        """The call raises, and one sees no trace of it."""
        before = self.state()
        with pytest.raises(error, match=message):
            call(*args, **options)
        assert self.state() == before

    def state(self) -> tuple[Any, ...]:
        """Everything that can be asked for."""
        scheduler = self.scheduler
        scheduler.check()
        groups = [*scheduler.waiting, *scheduler.running, *scheduler.swapped]
        seqs = [seq for group in groups for seq in scheduler.seqs_of(group).tolist()]
        return (
            scheduler.waiting,
            scheduler.running,
            scheduler.swapped,
            scheduler.num_free_gpu_blocks,
            scheduler.num_free_cpu_blocks,
            scheduler.num_preemptions,
            scheduler.num_recomputed_tokens,
            scheduler.queue_seconds,
            seqs,
            [scheduler.token_ids(seq).tolist() for seq in seqs],
            [scheduler.block_table(seq).tolist() for seq in seqs],
            [
                scheduler.block_table(seq, kv_group=group + 1).tolist()
                for seq in seqs
                for group in range(len(self.group_arrays["group_tables"]))
            ],
        )


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    return Engine


@pytest.fixture
def make_classic_engine() -> Callable[..., Engine]:
    return partial(Engine, is_classic=True)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def busy() -> Engine:
    """Two groups that decode, one of them of three sequences, and one that waits for blocks."""
    blocks = {"num_gpu_blocks": 10, "num_cpu_blocks": 4, "groups": GROUPS}
    engine = Engine({"max_loras": 1}, blocks)
    engine.add(5)
    engine.add(9, max_num_running_seqs=3, num_encoder_tokens=3, adapter=1)
    outputs = engine.schedule()
    engine.update(outputs, [(0, [7], False), *[(1, [token], False) for token in (7, 8, 9)]])
    engine.add(20, salt=5)
    return engine


@pytest.fixture
def group_arrays() -> dict[str, Any]:
    """Arrays for the groups of ``busy``."""
    return make_group_arrays(len(GROUPS))


@pytest.fixture
def arrays() -> dict[str, Any]:
    return make_arrays()

"""Padded decode steps give the tokens of plain ones, and padding touches nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedserve import _core
from pagedserve.config import EngineArgs
from pagedserve.executor.local import LocalExecutor
from pagedserve.executor.profile import largest_decode, largest_prefill
from pagedserve.executor.protocol import CacheShape, StepInput, StepLimits
from pagedserve.models.adapters import StepAdapters
from pagedserve.runner.buffers import BatchSizes, StepBuffers
from pagedserve.runner.model_runner import Forward
from pagedserve.runner.padded import PaddedDecode, ladder
from pagedserve.runner.profile import run_trial
from pagedserve.sampling.rows import RowSampling

BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_LEN = 32
NUM_TOKENS = 12
PROMPTS = [[5, 6, 7, 8, 9], [11], [1, 2, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [90, 3]]


@pytest.fixture(scope="module")
def executor(
    tmp_path_factory: pytest.TempPathFactory, tiny_config: dict[str, Any]
) -> LocalExecutor:
    directory: Path = tmp_path_factory.mktemp("tiny")
    config = tiny_config | {"initializer_range": 0.3}
    (directory / "config.json").write_text(json.dumps(config))
    return LocalExecutor(
        EngineArgs(
            model=str(directory),
            load_format="dummy",
            device="cpu",
            attention_backend="torch",
            cpu_kernels="generic",
        )
    )


def fresh_scheduler(executor: LocalExecutor) -> _core.Scheduler:
    """Over pools full of NaN, with room for all prompts at once."""
    executor.init_cache(
        CacheShape(
            num_gpu_blocks=NUM_BLOCKS,
            num_cpu_blocks=0,
            block_size=BLOCK_SIZE,
            limits=StepLimits(max_num_tokens=MAX_LEN, max_num_rows=8, max_model_len=MAX_LEN),
        )
    )
    for pool in executor.worker.cache.gpu_pools:
        pool.fill_(torch.nan)
    config = _core.SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=MAX_LEN, max_model_len=MAX_LEN
    )
    cache = _core.CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS)
    return _core.Scheduler(config, cache)


@pytest.fixture
def scheduler(executor: LocalExecutor) -> _core.Scheduler:
    return fresh_scheduler(executor)


class Recorder(PaddedDecode):
    """Notes the sizes of the steps that it ran."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.seen: list[tuple[int, int]] = []

    def _logits(self, step: BatchSizes, size: int, adapters: StepAdapters | None) -> torch.Tensor:
        self.seen.append((step.num_rows, size))
        return super()._logits(step, size, adapters)


def padded(executor: LocalExecutor, sizes: tuple[int, ...]) -> Recorder:
    worker = executor.worker
    forward = Forward(worker.loaded, worker.cache)
    decode = Recorder(forward, executor.buffers, sizes=sizes, block_size=BLOCK_SIZE)
    worker.runner._padded = decode
    return decode


def generate(executor: LocalExecutor, scheduler: _core.Scheduler) -> dict[int, list[int]]:
    """Greedy tokens of each prompt, which end at different steps."""
    texts: dict[int, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        ids = np.array(prompt, dtype=np.int32)
        texts[scheduler.add_seq_group(ids, arrival_time=float(index))[1]] = []
    lengths = dict(zip(texts, (NUM_TOKENS, 3, 7, NUM_TOKENS, 1), strict=True))
    while scheduler.has_unfinished:
        outputs = scheduler.schedule(0.0)
        scheduler.prepare_inputs(executor.buffers.writable())
        rows = [RowSampling(temperature=0.0)] * outputs.num_samples
        tokens = executor.launch(StepInput.of(outputs, rows)).results().sampled.tokens
        parents = executor.buffers.sample_rows[: outputs.num_samples].copy()
        handles = executor.buffers.row_handles[parents].tolist()
        for handle, token in zip(handles, tokens.tolist(), strict=True):
            texts[handle].append(token)
        done = [len(texts[handle]) == lengths[handle] for handle in handles]
        starts = np.arange(len(parents) + 1, dtype=np.int32)
        scheduler.update(outputs.step_id, parents, starts, tokens, np.array(done, dtype=np.uint8))
    return texts


def test_tokens_are_the_same_padded_and_not(
    executor: LocalExecutor, scheduler: _core.Scheduler
) -> None:
    expected = list(generate(executor, scheduler).values())
    decode = padded(executor, (1, 4, 8))
    assert list(generate(executor, scheduler).values()) == expected
    assert set(decode.seen) == {(4, 4), (3, 4), (2, 4)}
    decode = padded(executor, (8,))
    assert list(generate(executor, scheduler).values()) == expected
    assert set(decode.seen) == {(4, 8), (3, 8), (2, 8)}


def test_inputs_stand_for_the_tokens_of_the_step_before(
    executor: LocalExecutor, scheduler: _core.Scheduler
) -> None:
    for index, prompt in enumerate(PROMPTS[:3]):
        scheduler.add_seq_group(np.array(prompt, dtype=np.int32), arrival_time=float(index))
    outputs = scheduler.schedule(0.0)
    scheduler.prepare_inputs(executor.buffers.writable())
    rows = [RowSampling(temperature=0.0)] * 3
    tokens = torch.from_numpy(executor.launch(StepInput.of(outputs, rows)).tokens())
    assert scheduler.update_async(outputs.step_id)
    outputs = scheduler.schedule(0.0)
    scheduler.prepare_inputs(executor.buffers.writable())
    assert executor.buffers.on_device.token_ids[:3].tolist() == [-1, -2, -3]
    runner = executor.worker.runner
    expected = runner.execute(outputs, previous_tokens=tokens).clone()
    assert executor.buffers.on_device.token_ids[:3].equal(tokens)
    decode = padded(executor, (4,))
    scheduler.prepare_inputs(executor.buffers.writable())
    torch.testing.assert_close(runner.execute(outputs, previous_tokens=tokens), expected)
    assert decode.seen == [(3, 4)]


def written(executor: LocalExecutor) -> list[list[bool]]:
    """Which slots of the first layer hold something."""
    pool = executor.worker.cache.gpu_pools[0]
    return (~pool.isnan()).any(dim=3).any(dim=2).tolist()


def test_padding_writes_to_no_slot(executor: LocalExecutor, scheduler: _core.Scheduler) -> None:
    generate(executor, scheduler)
    expected = written(executor)
    assert sum(map(sum, expected)) > 0
    scheduler = fresh_scheduler(executor)
    decode = padded(executor, (8,))
    generate(executor, scheduler)
    assert len(decode.seen) > 0
    assert written(executor) == expected


def test_steps_of_other_kinds_are_left_alone(
    executor: LocalExecutor, scheduler: _core.Scheduler
) -> None:
    decode = padded(executor, (2,))
    for number in range(3):
        ids = np.array([number + 1, 5], dtype=np.int32)
        scheduler.add_seq_group(ids, arrival_time=0.0)
    prefill = scheduler.schedule(0.0)
    assert not decode.fits(prefill)
    scheduler.prepare_inputs(executor.buffers.writable())
    scheduler.update(
        prefill.step_id,
        np.arange(3, dtype=np.int32),
        np.arange(4, dtype=np.int32),
        np.array([7, 8, 9], dtype=np.int32),
        np.array([0, 0, 1], dtype=np.uint8),
    )
    decoding = scheduler.schedule(0.0)
    assert decoding.num_rows == 2
    assert decode.fits(decoding)
    decode.sizes = (1,)
    assert not decode.fits(decoding)


def test_a_size_has_its_inputs_at_one_address(
    executor: LocalExecutor, scheduler: _core.Scheduler
) -> None:
    decode = padded(executor, (4, 8))
    seen: dict[int, set[tuple[int, ...]]] = {4: set(), 8: set()}
    logits = decode._logits

    def note(step: BatchSizes, size: int, adapters: StepAdapters | None) -> torch.Tensor:
        inputs = decode._inputs(step, size)
        rows = inputs.metadata.rows()
        assert rows.query_start.tolist() == [min(n, step.num_rows) for n in range(size + 1)]
        assert rows.seq_lens[step.num_rows :].tolist() == [0] * (size - step.num_rows)
        assert (inputs.metadata.slot_mapping[step.num_rows :] == -1).all()
        layout = inputs.metadata.layout
        tables = rows.block_tables[: step.num_rows, : step.max_num_blocks].numpy()
        assert np.array_equal(tables, layout.block_tables)
        tensors = (inputs.token_ids, inputs.positions, inputs.metadata.slot_mapping)
        more = (rows.query_start, rows.seq_lens, rows.block_tables)
        seen[size].add(tuple(tensor.data_ptr() for tensor in (*tensors, *more)))
        return logits(step, size, adapters)

    decode._logits = note  # type: ignore[method-assign]
    generate(executor, scheduler)
    assert len(seen[4]) == 1


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (30, (1, 2, 4, 8, 16, 24, 30)),
        (1000, (1, 2, 4, *range(8, 257, 8))),
    ],
)
def test_the_ladder_ends_at_the_most_rows(most: int, sizes: tuple[int, ...]) -> None:
    assert ladder(most) == sizes


def test_rows_that_pad_have_no_adapter(scheduler: _core.Scheduler) -> None:
    buffers = StepBuffers(
        max_num_tokens=32, max_num_rows=4, max_blocks_per_row=8, has_adapters=True
    )
    buffers.adapter_slots[:] = 3
    scheduler.add_seq_group(np.array([7], dtype=np.int32), arrival_time=0.0)
    outputs = scheduler.schedule(0.0)
    scheduler.prepare_inputs(buffers.writable())
    buffers.pad(outputs, 3)
    assert buffers.adapter_slots.tolist() == [-1, -1, -1, 3]


def test_buffers_lie_in_one_piece_with_the_tables_last() -> None:
    buffers = StepBuffers(
        max_num_tokens=33,
        max_num_rows=3,
        max_blocks_per_row=5,
        num_adapter_slots=2,
        groups=[_core.KVGroup("window", window=9, num_gpu_blocks=9)],
    )
    arrays = buffers.on_device
    names = list(arrays.__slots__)
    starts = [getattr(arrays, name).data_ptr() for name in names]
    ends = [start + getattr(arrays, name).nbytes for name, start in zip(names, starts, strict=True)]
    assert names[-2:] == ["block_tables", "window_tables"]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert {(start - starts[0]) % 128 for start in starts} == {0}
    assert len({getattr(arrays, name).untyped_storage().data_ptr() for name in names}) == 1


def test_the_largest_steps_can_be_tried_out(
    executor: LocalExecutor, scheduler: _core.Scheduler
) -> None:
    del scheduler
    limits = StepLimits(max_num_tokens=80, max_num_rows=6, max_model_len=MAX_LEN)
    prefill, decode = largest_prefill(limits), largest_decode(limits)
    assert [row.num_queries for row in prefill] == [32, 32, 16]
    assert [(row.num_queries, row.seq_len) for row in decode] == [(1, MAX_LEN)] * 6
    shapes: list[torch.Size] = []
    head = executor.worker.loaded.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _module, _given, out: shapes.append(out.shape))
    for rows in (prefill, decode):
        run_trial(executor.worker.loaded, rows, num_samples=6, block_size=BLOCK_SIZE)
    hook.remove()
    assert shapes == [(1, 6, 97), (1, 6, 97)]

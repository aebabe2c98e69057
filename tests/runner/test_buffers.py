"""The step's views are the very memory that the core fills."""

import numpy as np

from pagedserve import _core
from pagedserve.runner.buffers import StepBuffers


def test_views_are_cut_to_the_step_and_share_memory() -> None:
    buffers = StepBuffers(
        max_num_tokens=32, max_num_rows=4, max_blocks_per_row=8, has_adapters=True
    )
    scheduler = _core.Scheduler(
        _core.SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32),
        _core.CacheConfig(block_size=4, num_gpu_blocks=16),
    )
    scheduler.add_seq_group(np.arange(10, 15, dtype=np.int32), arrival_time=0.0)
    scheduler.add_seq_group(np.arange(20, 29, dtype=np.int32), arrival_time=0.0)
    outputs = scheduler.schedule(0.0)
    scheduler.prepare_inputs(buffers.writable())
    inputs = buffers.inputs(outputs, 4)
    assert inputs.token_ids.tolist() == [[*range(10, 15), *range(20, 29)]]
    assert inputs.positions.tolist() == [[*range(5), *range(9)]]
    assert inputs.sample_index.tolist() == [4, 13]
    layout = inputs.metadata.layout
    assert layout.query_start.tolist() == [0, 5, 14]
    assert layout.seq_lens.tolist() == [5, 9]
    assert layout.block_tables.shape == (2, 3)
    slots = inputs.metadata.slot_mapping
    for row, (start, end) in enumerate([(0, 5), (5, 14)]):
        for position, slot in enumerate(slots[start:end].tolist()):
            assert slot == layout.block_tables[row, position // 4] * 4 + position % 4
    assert buffers.adapter_slots[:2].tolist() == [-1, -1]

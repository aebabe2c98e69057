"""``BlockSpaceManager`` as a class of its own, and ``SequenceGroupMetadata``."""

from typing import Any

import numpy as np
import pytest

from pagedserve._core import BlockSpaceManager, CacheConfig, KVGroup, Scheduler, SchedulerConfig
from pagedserve.errors import RequestError, StaleHandleError, StepError


def manager(num_lookahead_slots: int = 0, **config: Any) -> BlockSpaceManager:
    given = {"block_size": 4, "num_gpu_blocks": 8, "watermark": 0.0} | config
    return BlockSpaceManager(CacheConfig(**given), num_lookahead_slots=num_lookahead_slots)


def prompt(length: int, first: int = 0) -> Any:
    return np.arange(first, first + length, dtype=np.int32)


def test_a_group_is_allocated_grows_forks_and_ends() -> None:
    space = manager()
    group, seq = space.add_seq_group(prompt(6), max_num_running_seqs=2)
    assert space.can_allocate(group) == "ok"
    space.allocate(group)
    assert len(space.block_table(seq)) == 2
    space.append_token(seq, 9)
    child = space.fork(seq)
    space.append_token(child, 10)
    copies = space.append_slots(group)
    assert copies.shape == (1, 2)
    tables = [space.block_table(handle).tolist() for handle in (seq, child)]
    assert tables[0][0] == tables[1][0]
    assert tables[0][1] != tables[1][1]
    space.free(seq)
    space.free(child)
    assert space.num_free_gpu_blocks == 8
    with pytest.raises(StaleHandleError):
        space.block_table(seq)


def test_too_little_is_later_and_too_much_is_never() -> None:
    space = manager(watermark=0.26)
    assert space.watermark_blocks == 2
    big, _ = space.add_seq_group(prompt(28))
    assert space.can_allocate(big) == "never"
    first, _ = space.add_seq_group(prompt(13))
    space.allocate(first)
    second, _ = space.add_seq_group(prompt(13))
    assert space.can_allocate(second) == "later"
    with pytest.raises(StepError, match="can_allocate answers Later"):
        space.allocate(second)
    assert space.num_free_gpu_blocks == 4


def test_a_group_moves_to_the_host_and_back() -> None:
    space = manager(num_cpu_blocks=4)
    group, seq = space.add_seq_group(prompt(9))
    space.allocate(group)
    assert space.can_swap_out(group)
    out = space.swap_out(group)
    assert (len(out), space.num_free_gpu_blocks, space.num_free_cpu_blocks) == (3, 8, 1)
    assert space.block_table(seq).tolist() == out[:, 1].tolist()
    assert space.can_swap_in(group) == "ok"
    assert space.swap_in(group)[:, 0].tolist() == out[:, 1].tolist()
    assert space.num_free_cpu_blocks == 4


def test_computed_blocks_are_shared_with_the_next_and_survive_their_end() -> None:
    space = manager(enable_prefix_caching=True)
    group, seq = space.add_seq_group(prompt(9))
    space.begin_step()
    space.allocate(group)
    space.append_token(seq, 50)
    assert space.last_access(seq) == 1
    assert space.common_computed_blocks(group).tolist() == space.block_table(seq)[:2].tolist()
    again, twin = space.add_seq_group(prompt(9))
    space.allocate(again)
    assert space.num_computed_tokens(twin) == 8
    assert space.block_table(twin)[:2].tolist() == space.block_table(seq)[:2].tolist()
    assert not space.reset_prefix_cache()
    for handle in (seq, twin):
        space.free(handle)
    late, third = space.add_seq_group(prompt(9))
    space.allocate(late)
    assert space.num_computed_tokens(third) == 8


def test_encoder_blocks_are_one_table_a_group() -> None:
    space = manager(groups=[KVGroup("cross")])
    group, seq = space.add_seq_group(prompt(3), num_encoder_tokens=9)
    space.allocate(group)
    assert len(space.block_table(seq, kv_group=1)) == 3
    with pytest.raises(IndexError, match="kv_group is 2; there are 2"):
        space.block_table(seq, kv_group=2)
    space.free(seq)
    assert space.num_free_gpu_blocks == 8


def test_lookahead_slots_are_there_with_the_next_token() -> None:
    space = manager(num_lookahead_slots=5)
    group, seq = space.add_seq_group(prompt(4))
    space.allocate(group)
    space.append_token(seq, 9)
    space.append_slots(group)
    assert len(space.block_table(seq)) == 3  # ten slots


def test_acts_out_of_turn_are_refused_and_change_nothing() -> None:
    space = manager(num_cpu_blocks=1)
    group, seq = space.add_seq_group(prompt(9))
    for act in (space.append_slots, space.swap_out, space.swap_in, space.can_append_slots):
        with pytest.raises(StepError, match="is Waiting; it must be"):
            act(group)
    for tokens, message in (([], "at least one token"), ([-1], "token id -1; ids are at")):
        with pytest.raises(RequestError, match=message):
            space.add_seq_group(np.array(tokens, dtype=np.int32))
    space.allocate(group)
    with pytest.raises(StepError, match="is Running; it must be Waiting"):
        space.allocate(group)
    with pytest.raises(StepError, match="can_swap_out answers no"):
        space.swap_out(group)
    with pytest.raises(RequestError, match="token id is -2"):
        space.append_token(seq, -2)
    with pytest.raises(StepError, match=r"9 computed tokens; 0\.\.9 are accepted"):
        space.mark_computed(seq, 9)
    with pytest.raises(StaleHandleError):
        space.fork(group + 1)
    assert (space.num_free_gpu_blocks, len(space.block_table(seq))) == (5, 3)


def test_metadata_tells_all_of_a_step_and_as_a_delta_what_is_new() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, max_loras=1),
        CacheConfig(block_size=4, num_gpu_blocks=16),
    )
    group, seq = scheduler.add_seq_group(prompt(8), arrival_time=0.0, adapter=3)
    step = scheduler.schedule(0.0)
    (whole,) = scheduler.seq_group_metadata()
    assert (whole.group, whole.is_prompt, whole.do_sample, whole.adapter) == (group, True, True, 3)
    assert whole.token_ids[seq].tolist() == list(range(8))
    assert len(whole.block_tables[seq]) == 2
    zero = np.array([0], dtype=np.int32)
    scheduler.update(
        step.step_id, zero, np.array([0, 1], np.int32), zero + 77, np.zeros(1, dtype=np.uint8)
    )
    scheduler.schedule(0.0)
    (whole,) = scheduler.seq_group_metadata()
    (delta,) = scheduler.seq_group_metadata(delta=True)
    assert whole.token_ids[seq].tolist() == [*range(8), 77]
    assert delta.token_ids[seq].tolist() == [77]
    assert delta.block_tables[seq].tolist() == whole.block_tables[seq][2:].tolist()
    assert (delta.is_delta, delta.token_chunk_size, delta.num_computed_tokens) == (
        True,
        1,
        {seq: 8},
    )
    assert len(delta.cross_block_table) == len(delta.computed_block_nums) == 0


def test_a_group_with_a_window_holds_what_later_tokens_see() -> None:
    window = KVGroup("window", window=6, num_gpu_blocks=8, num_cpu_blocks=8)
    space = manager(num_gpu_blocks=16, num_cpu_blocks=16, groups=[window])
    group, seq = space.add_seq_group(prompt(10), max_num_running_seqs=2)
    space.allocate(group)
    assert len(space.block_table(seq)) == len(space.block_table(seq, kv_group=1)) == 3
    space.append_token(seq, 7)  # the prompt is computed: of 10 tokens the next sees the last 5
    assert len(space.block_table(seq, kv_group=1)) == 2
    assert len(space.append_slots(group)) == 0
    child = space.fork(seq)
    space.append_token(seq, 8)
    space.append_token(child, 9)
    assert len(space.append_slots(group)) == 1
    assert [len(moves.copy) for moves in space.moves] == [1, 1], "each writes its own last block"
    own, others = (space.block_table(each, kv_group=1).tolist() for each in (seq, child))
    assert own[0] == others[0]
    assert own[1] != others[1]
    assert len(space.swap_out(group)) == len({*space.block_table(seq), *space.block_table(child)})
    assert len(space.moves[1].swap_out) == 3
    space.swap_in(group)
    space.free(seq)
    space.free(child)
    assert (space.num_free_gpu_blocks, space.num_free_cpu_blocks) == (16, 16)


def test_a_token_needs_a_slot_before_the_next() -> None:
    for enable_prefix_caching in (False, True):
        space = BlockSpaceManager(
            CacheConfig(block_size=4, num_gpu_blocks=3, enable_prefix_caching=enable_prefix_caching)
        )
        group, seq = space.add_seq_group(prompt(4))
        space.allocate(group)
        space.append_token(seq, 7)
        with pytest.raises(StepError, match="has 5 tokens and slots for 4; call append_slots"):
            space.append_token(seq, 8)
        space.append_slots(group)
        for token in (8, 9, 10, 11):
            space.append_token(seq, token)
        assert len(space.block_table(seq)) == 2


def test_a_swapped_group_has_no_computed_blocks() -> None:
    space = BlockSpaceManager(
        CacheConfig(block_size=4, num_gpu_blocks=4, num_cpu_blocks=16, enable_prefix_caching=True)
    )
    for number in range(5):
        group, seq = space.add_seq_group(prompt(9) + 100 * number)
        space.begin_step()
        space.allocate(group)
        space.mark_computed(seq, 8)
        assert len(space.common_computed_blocks(group)) == 2
        space.swap_out(group)
        assert not len(space.common_computed_blocks(group))


def test_metadata_is_that_of_the_open_step() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32),
        CacheConfig(block_size=4, num_gpu_blocks=16),
    )
    assert scheduler.seq_group_metadata() == []
    scheduler.add_seq_group(prompt(8), arrival_time=0.0)
    step = scheduler.schedule(0.0)
    assert len(scheduler.seq_group_metadata()) == 1
    scheduler.update_async(step.step_id)
    assert scheduler.seq_group_metadata() == []

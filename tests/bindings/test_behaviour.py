"""What a caller from Python sees of a step: inputs, tables, moves, and who goes first."""

from collections.abc import Callable
from typing import Any

import pytest

from pagedserve import KVGroup

MakeEngine = Callable[..., Any]

CACHED = {"enable_prefix_caching": True}
CHUNKED = {"enable_chunked_prefill": True}


def run_alone(engine: Any, prompt: list[int], **options: Any) -> Any:
    """The inputs of a prompt's one step, after which it has ended."""
    engine.add(prompt, **options)
    outputs = engine.schedule()
    (row,) = engine.inputs(outputs)
    engine.update(outputs, [(0, [7], True)])
    return row


# The prefix cache


def test_a_known_prefix_is_not_computed_again(make_engine: MakeEngine) -> None:
    engine = make_engine({}, CACHED)
    first = run_alone(engine, list(range(10)))
    assert first.positions == list(range(10))
    group, _ = engine.add([*range(8), 50, 51, 52])
    outputs = engine.schedule()
    assert outputs.num_batched_tokens == 3
    (row,) = engine.inputs(outputs)
    assert row.positions == [8, 9, 10]
    assert row.token_ids == [50, 51, 52]
    assert row.num_keys == 11
    assert row.table[:2] == first.table[:2], "the very blocks"
    assert row.slots == [row.table[2] * 4 + offset for offset in range(3)]
    assert engine.scheduler.common_computed_blocks(group).tolist() == first.table[:2]


def test_a_whole_known_prompt_computes_its_last_token_and_writes_nothing(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine({}, CACHED)
    first = run_alone(engine, list(range(8)))
    row = run_alone(engine, list(range(8)))
    assert (row.positions, row.token_ids, row.slots) == ([7], [7], [-1])
    assert row.table[:2] == first.table[:2]


def test_the_classic_way_computes_a_known_prefix_again_without_writing_it(
    make_classic_engine: MakeEngine,
) -> None:
    engine = make_classic_engine({}, CACHED)
    run_alone(engine, list(range(10)))
    row = run_alone(engine, [*range(8), 50, 51, 52])
    assert row.positions == list(range(11))
    assert row.slots[:8] == [-1] * 8
    assert row.slots[8:] == [row.table[2] * 4 + offset for offset in range(3)]


@pytest.mark.parametrize("different", [{"salt": 1}, {"salt": 2**64 - 1}, {"adapter": 1}])
def test_salt_and_adapter_keep_prefixes_apart(
    make_engine: MakeEngine, different: dict[str, int]
) -> None:
    engine = make_engine({"max_loras": 2}, CACHED)
    prompt = list(range(10))
    run_alone(engine, prompt)
    other = run_alone(engine, prompt, **different)
    assert other.positions == list(range(10)), "not known under this key"
    for options in ({}, different):
        assert run_alone(engine, prompt, **options).positions == [8, 9]


def test_a_prefix_is_known_by_what_comes_before_it_too(make_engine: MakeEngine) -> None:
    engine = make_engine({}, CACHED)
    run_alone(engine, [*range(4), *range(4), 9])
    assert run_alone(engine, [1, *range(1, 4), *range(4), 9]).positions == list(range(9))
    assert run_alone(engine, [*range(4), 9]).positions == [4]


def test_generated_tokens_are_known_to_the_next_turn(make_engine: MakeEngine) -> None:
    engine = make_engine({}, CACHED)
    group, _ = engine.add(list(range(6)))
    for token in (20, 21, 22):
        engine.step(token)
    engine.scheduler.abort(group)
    row = run_alone(engine, [*range(6), 20, 21, 22, 23])
    assert row.positions == [8, 9]


def test_what_was_not_computed_is_not_known(make_engine: MakeEngine) -> None:
    engine = make_engine(CHUNKED | {"max_num_batched_tokens": 8}, CACHED)
    group, _ = engine.add(list(range(20)))
    engine.step()
    engine.scheduler.abort(group)
    assert run_alone(engine, [*range(12), 9]).positions == list(range(8, 13))


def test_a_step_that_failed_has_computed_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine({}, CACHED)
    group, _ = engine.add(list(range(10)))
    engine.scheduler.abandon(engine.schedule().step_id)
    engine.scheduler.abort(group)
    assert run_alone(engine, list(range(10))).positions == list(range(10))


def test_the_prefix_cache_is_reset_when_nobody_uses_it(make_engine: MakeEngine) -> None:
    engine = make_engine({}, CACHED)
    prompt = list(range(10))
    run_alone(engine, prompt)
    group, _ = engine.add(prompt)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.scheduler.abort(group)
    assert run_alone(engine, prompt).positions == [8, 9], "a refusal forgets nothing"
    assert engine.scheduler.reset_prefix_cache()
    assert run_alone(engine, prompt).positions == list(range(10))
    assert make_engine().scheduler.reset_prefix_cache(), "without a cache there is nothing to keep"


def test_requests_of_one_step_share_what_one_of_them_computes(make_engine: MakeEngine) -> None:
    engine = make_engine({}, CACHED)
    engine.add([*range(8), 20])
    engine.add([*range(8), 21])
    rows = engine.inputs(engine.schedule())
    assert [row.positions for row in rows] == [list(range(9)), [8]]
    assert rows[0].table[:2] == rows[1].table[:2]


# Windows, encoders, lookahead


def test_under_a_window_the_table_repeats_its_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine({}, {"sliding_window": 8})
    _, seq = engine.add(10)
    for step in range(12):
        _, (row,) = engine.step()
        num_blocks = -(-row.num_keys // 4)
        table = row.table[:num_blocks]
        assert len(set(table)) <= 2
        assert table == [table[index % 2] for index in range(num_blocks)]
        position = row.positions[-1]
        assert row.slots[-1] == table[position // 4] * 4 + position % 4
        assert engine.scheduler.num_free_gpu_blocks == 14, step
    assert len(set(engine.scheduler.block_table(seq).tolist())) == 2


def test_an_encoder_has_one_table_for_its_group_that_nobody_grows(make_engine: MakeEngine) -> None:
    engine = make_engine(
        {}, {"num_gpu_blocks": 10, "num_cpu_blocks": 10, "groups": [KVGroup("cross")]}
    )
    group, seq = engine.add(4, num_encoder_tokens=9, max_num_running_seqs=2)
    assert engine.scheduler.block_table(seq, kv_group=1).tolist() == []
    engine.update(engine.schedule(), [(0, [7], False), (0, [8], False)])
    cross = engine.scheduler.block_table(seq, kv_group=1).tolist()
    assert len(set(cross)) == 3
    for _ in range(5):
        _, rows = engine.step()
        for each in engine.scheduler.seqs_of(group).tolist():
            assert engine.scheduler.block_table(each, kv_group=1).tolist() == cross
        assert not set(cross) & {
            block for row in rows for block in row.table[: -(-row.num_keys // 4)]
        }
    engine.scheduler.abort(group)
    assert engine.scheduler.num_free_gpu_blocks == 10


def test_rows_know_the_table_of_their_encoder(make_engine: MakeEngine) -> None:
    engine = make_engine({}, {"num_gpu_blocks": 12, "groups": [KVGroup("cross")]})
    _, long = engine.add(4, num_encoder_tokens=9, max_num_running_seqs=2)
    engine.add(3)
    _, short = engine.add(3, num_encoder_tokens=4)
    outputs = engine.schedule()
    engine.update(outputs, [(0, [7], False), (0, [8], False), (1, [7], False), (2, [7], False)])
    outputs = engine.schedule()
    tables = [row.group_tables[0] for row in engine.inputs(outputs)]
    of_long = engine.scheduler.block_table(long, kv_group=1).tolist()
    of_short = engine.scheduler.block_table(short, kv_group=1).tolist()
    assert engine.arrays["cross_lens"][:4].tolist() == [9, 9, 0, 4]
    assert tables == [of_long, of_long, [0] * 3, of_short + [0] * 2]


def test_several_accepted_tokens_are_computed_already_but_for_the_last(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine({"num_lookahead_slots": 3})
    _, seq = engine.add(6)
    engine.step(50)
    outputs = engine.schedule()
    assert outputs.num_lookahead_slots == 3
    (row,) = engine.inputs(outputs)
    assert (row.positions, row.token_ids) == ([6], [50])
    assert len(row.table) == 3, "room for tokens 6 to 9"
    message = "has 5 tokens; it may have 4"
    engine.refuses(Exception, message, engine.update, outputs, [(0, [51] * 5, False)])
    engine.update(outputs, [(0, [51, 52, 53], False)])
    assert engine.scheduler.token_ids(seq).tolist()[6:] == [50, 51, 52, 53]
    (row,) = engine.inputs(engine.schedule())
    assert (row.positions, row.token_ids, row.num_keys) == ([9], [53], 10)


def test_a_prefill_and_a_fork_accept_one_token(make_engine: MakeEngine) -> None:
    engine = make_engine({"num_lookahead_slots": 3})
    engine.add(6, max_num_running_seqs=2)
    outputs = engine.schedule()
    engine.refuses(Exception, "may have 1", engine.update, outputs, [(0, [1, 2], False)])
    engine.update(outputs, [(0, [1], False)])
    outputs = engine.schedule()
    results = [(0, [1, 2], False), (0, [3], False)]
    engine.refuses(Exception, "may have 1", engine.update, outputs, results)


# Who runs


def test_decodes_and_chunks_share_a_step(make_engine: MakeEngine) -> None:
    engine = make_engine(CHUNKED | {"max_num_batched_tokens": 8})
    engine.add(3)
    engine.step()
    engine.add(20)
    sizes: list[int] = []
    for _ in range(3):
        outputs, rows = engine.step()
        assert outputs.num_prefill_groups == 1
        assert (outputs.num_prefill_rows, outputs.num_rows) == (1, 2)
        assert [len(row.positions) for row in rows] == [outputs.num_prefill_tokens, 1]
        assert not rows[0].is_sampled or sizes == [7, 7]
        sizes.append(outputs.num_prefill_tokens)
    assert sizes == [7, 7, 6]
    outputs, _ = engine.step()
    assert (outputs.num_prefill_groups, outputs.num_rows) == (0, 2)


def test_a_higher_priority_takes_the_place_of_a_lower_one(make_engine: MakeEngine) -> None:
    engine = make_engine({"policy": "priority", "max_num_seqs": 2})
    low, _ = engine.add(4, priority=5)
    middle, _ = engine.add(4, priority=3)
    engine.step()
    high, _ = engine.add(4, priority=-1)
    outputs, _ = engine.step()
    assert outputs.preempted == [(low, "recompute")]
    assert engine.scheduler.waiting[0] in {high, low}
    engine.step()
    assert set(engine.scheduler.running) == {middle, high}
    assert engine.scheduler.waiting == [low]
    equal, _ = engine.add(4, priority=3)
    for _ in range(3):
        outputs, _ = engine.step()
        assert not outputs.preempted
    assert engine.scheduler.waiting == [equal, low]


def test_adapters_beyond_the_slots_wait_and_are_passed_over(make_engine: MakeEngine) -> None:
    engine = make_engine({"max_loras": 1})
    first, _ = engine.add(4, adapter=1)
    other, _ = engine.add(4, adapter=2)
    plain, _ = engine.add(4)
    same, _ = engine.add(4, adapter=1)
    outputs, _ = engine.step()
    assert [entry.group for entry in outputs.scheduled_seq_groups] == [first, plain, same]
    assert outputs.refused == [(other, "no_adapter_slot")]
    for group in (first, same):
        engine.scheduler.abort(group)
    outputs, _ = engine.step()
    assert [entry.group for entry in outputs.scheduled_seq_groups] == [other]


def test_rows_name_slots_and_a_step_what_it_loads_into_them(make_engine: MakeEngine) -> None:
    engine = make_engine({"max_loras": 2})
    for adapter in (4_000_000_000, 0, 7, 4_000_000_000):
        engine.add(4, adapter=adapter)
    outputs, rows = engine.step()
    assert outputs.adapters_to_load == [(4_000_000_000, 0), (7, 1)]
    assert [row.adapter_slot for row in rows] == [0, -1, 1, 0]
    outputs, rows = engine.step()
    assert outputs.adapters_to_load == []
    assert [row.adapter_slot for row in rows] == [0, -1, 1, 0]


def test_the_loads_of_an_abandoned_step_come_again(make_engine: MakeEngine) -> None:
    engine = make_engine({"max_loras": 1})
    engine.add(4, adapter=3)
    outputs = engine.schedule()
    assert outputs.adapters_to_load == [(3, 0)]
    engine.scheduler.abandon(outputs.step_id)
    outputs, _ = engine.step()
    assert outputs.adapters_to_load == [(3, 0)]


# Moves


def test_a_group_goes_to_the_host_and_comes_back_with_its_contents(make_engine: MakeEngine) -> None:
    engine = make_engine({"preemption_mode": "swap"}, {"num_gpu_blocks": 6, "num_cpu_blocks": 8})
    old, old_seq = engine.add(8)
    young, young_seq = engine.add(11)
    engine.step()
    before = engine.scheduler.block_table(young_seq).tolist()
    assert engine.step()[0].preempted == []
    outputs, _ = engine.step()
    assert outputs.preempted == [(young, "swap")]
    assert outputs.has_moves
    out = outputs.blocks_to_swap_out
    assert (out.dtype.name, out.shape) == ("int64", (len(before), 2))
    assert out[:, 0].tolist() == before
    host = engine.scheduler.block_table(young_seq).tolist()
    assert out[:, 1].tolist() == host
    assert engine.scheduler.num_free_cpu_blocks == 8 - len(host)
    assert engine.scheduler.swapped == [young]
    engine.scheduler.abort(old)
    outputs, (row,) = engine.step()
    assert outputs.swapped_in == [young]
    back = outputs.blocks_to_swap_in
    assert back[:, 0].tolist() == host
    assert back[:, 1].tolist() == row.table[: len(host)]
    assert row.positions == [len(engine.scheduler.token_ids(young_seq)) - 2]
    assert engine.scheduler.num_free_cpu_blocks == 8
    assert old_seq != young_seq


def test_a_shared_block_is_copied_before_it_is_written(make_engine: MakeEngine) -> None:
    engine = make_engine()
    group, _ = engine.add(6, max_num_running_seqs=3)
    engine.update(engine.schedule(), [(0, [token], False) for token in (1, 2, 3)])
    tables = [engine.scheduler.block_table(seq).tolist() for seq in engine.scheduler.seqs_of(group)]
    assert tables[0] == tables[1] == tables[2]
    outputs, rows = engine.step()
    copies = outputs.blocks_to_copy.tolist()
    assert [source for source, _ in copies] == [tables[0][1]] * 2
    assert len({slot for row in rows for slot in row.slots}) == 3
    assert {row.table[1] for row in rows} == {tables[0][1], *(target for _, target in copies)}
    assert {row.table[0] for row in rows} == {tables[0][0]}
    outputs, _ = engine.step()
    assert not outputs.has_moves


def test_an_abort_during_a_step_waits_for_its_end(engine: Any) -> None:
    group, seq = engine.add(5)
    outputs = engine.schedule()
    assert engine.scheduler.abort(group)
    assert not engine.scheduler.abort(group), "twice is once"
    assert engine.scheduler.token_ids(seq).tolist(), "the step may still ask"
    assert engine.scheduler.num_free_gpu_blocks == 14
    engine.update(outputs, [(0, [7], False)])
    assert not engine.scheduler.has_unfinished
    assert engine.scheduler.num_free_gpu_blocks == 16


def test_an_abandoned_step_is_computed_again(make_engine: MakeEngine) -> None:
    engine = make_engine({}, CACHED)
    groups = [engine.add([*range(9), number])[0] for number in (50, 60)]
    engine.step()
    engine.scheduler.abandon(engine.schedule().step_id)
    assert engine.scheduler.waiting == groups
    outputs, rows = engine.step()
    assert [entry.group for entry in outputs.scheduled_seq_groups] == groups
    assert [row.num_keys for row in rows] == [11, 11]

"""What the classic scheduler gets wrong without a crash, and what its users suffer from.

Its crashes, leaks and livelocks are among the recorded scenarios (``tests/replay``); these are the
decisions.  Where an option brings the classic way back, a test shows that way beside ours.
"""

from collections.abc import Callable
from typing import Any

import pytest

from pagedserve import CacheChoices, SchedulerChoices

MakeEngine = Callable[..., Any]

CHUNKED = {"enable_chunked_prefill": True}


def scheduled(outputs: Any) -> list[int]:
    return [entry.group for entry in outputs.scheduled_seq_groups]


def blocks(num_gpu_blocks: int, **options: Any) -> dict[str, Any]:
    return {"num_gpu_blocks": num_gpu_blocks, "watermark": 0.0} | options


@pytest.mark.parametrize("charges", [False, True])
def test_cached_tokens_are_not_charged_to_the_budget(
    make_engine: MakeEngine, charges: bool
) -> None:
    choices = CacheChoices(charge_cached_tokens=charges)
    cache = blocks(64, enable_prefix_caching=True, choices=choices)
    engine = make_engine({"max_num_batched_tokens": 56}, cache)
    engine.add(range(48))
    engine.step()
    for number in (70, 80):
        engine.add([*range(48), number, number + 1])
    outputs, _ = engine.step()
    assert len(scheduled(outputs)) == (1 if charges else 2)
    assert outputs.num_batched_tokens == (50 if charges else 4)


@pytest.mark.parametrize("counts", [False, True])
def test_admission_counts_what_the_cache_holds(make_engine: MakeEngine, counts: bool) -> None:
    choices = CacheChoices(count_cached_blocks=counts)
    cache = blocks(14, enable_prefix_caching=True, choices=choices)
    engine = make_engine({}, cache)
    engine.add(range(48))
    engine.step()
    second, _ = engine.add([*range(48), 70])
    outputs = engine.schedule()
    assert (second in scheduled(outputs)) == counts, "13 blocks in all, one of its own, 2 free"
    assert outputs.refused == ([] if counts else [(second, "no_blocks")])


@pytest.mark.parametrize("num_victims", [1, 3])
def test_a_preemption_gives_back_what_its_victim_had(
    make_engine: MakeEngine, num_victims: int
) -> None:
    """The adapter and the sequences of the victim, not of the group that needed its blocks."""
    choices = SchedulerChoices(admit_after_preemption=True)
    limits = {"max_loras": 2, "max_num_seqs": 1 + num_victims, "choices": choices}
    swap = {"preemption_mode": "swap"}
    engine = make_engine(CHUNKED | limits | swap, blocks(5, num_cpu_blocks=8))
    asking, _ = engine.add(8, adapter=1)
    victim, _ = engine.add(12, adapter=2, max_num_running_seqs=num_victims)
    engine.step()
    newcomer, _ = engine.add(4, adapter=3, max_num_running_seqs=num_victims)
    outputs, _ = engine.step()
    assert outputs.preempted == [(victim, "swap")]
    assert set(scheduled(outputs)) == {asking, newcomer}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_victims_of_one_step_come_back_in_their_old_order(
    make_engine: MakeEngine, is_reversed: bool
) -> None:
    choices = SchedulerChoices(reverse_swapped_order=is_reversed)
    options = {"preemption_mode": "swap", "choices": choices}
    engine = make_engine(options, blocks(3, num_cpu_blocks=4))
    first, second, third = (engine.add(4)[0] for _ in range(3))
    engine.step()
    outputs, _ = engine.step()
    assert outputs.preempted == [(third, "swap"), (second, "swap")]
    engine.scheduler.abort(first)
    outputs, _ = engine.step()
    assert outputs.swapped_in == [third if is_reversed else second]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_head_that_does_not_fit_is_passed_a_bounded_number_of_times(
    make_engine: MakeEngine, most: int
) -> None:
    engine = make_engine({"max_num_bypasses": most}, blocks(12))
    running, _ = engine.add(20)
    engine.step()
    head, _ = engine.add(32)
    small = [engine.add(3)[0] for _ in range(4)]
    outputs, _ = engine.step()
    passed = [group for group in scheduled(outputs) if group in small]
    assert passed == small[:most]
    assert (head, "no_blocks") in outputs.refused
    for _ in range(3):
        outputs, _ = engine.step()
        assert not set(scheduled(outputs)) & set(small[most:]), "never again before the head"
    for group in (running, *passed):
        engine.scheduler.abort(group)
    outputs, _ = engine.step()
    assert scheduled(outputs)[0] == head


def test_a_swapped_group_does_not_stop_admission_for_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(
        {"preemption_mode": "swap", "max_num_bypasses": 2}, blocks(8, num_cpu_blocks=8)
    )
    engine.add(16)
    swapped, _ = engine.add(16)
    engine.step()
    outputs, _ = engine.step()
    assert outputs.preempted == [(swapped, "swap")]
    small = [engine.add(2)[0] for _ in range(3)]
    outputs, _ = engine.step()
    assert scheduled(outputs) == small[:2], "twice, and then the swapped one comes first"
    ended = []
    for _ in range(4):
        outputs, _ = engine.step()
        ended += [group for group in scheduled(outputs) if group == small[2]]
    assert not ended


def test_a_prompt_that_no_pool_holds_is_ended_and_blocks_nobody(make_engine: MakeEngine) -> None:
    for options in ({}, CHUNKED):
        engine = make_engine(options, blocks(8))
        large, _ = engine.add(40)
        small, _ = engine.add(4)
        outputs, _ = engine.step()
        reason = "the request needs 10 KV blocks; 8 can be given (raise num_gpu_blocks)"
        assert [ended[:2] for ended in outputs.ignored_seq_groups] == [(large, reason)]
        assert scheduled(outputs) == [small]


def test_a_chunked_prompt_is_admitted_only_if_all_of_it_fits(make_engine: MakeEngine) -> None:
    engine = make_engine(CHUNKED | {"max_num_batched_tokens": 8, "max_num_seqs": 4}, blocks(8))
    engine.add(8)
    engine.add(8)
    for _ in range(3):
        engine.step()
    late, _ = engine.add(16)
    outputs, _ = engine.step()
    assert outputs.refused == [(late, "no_blocks")], "its first chunk would have had room"
    assert outputs.preempted == []


def test_an_abort_may_come_when_its_request_finishes(make_engine: MakeEngine) -> None:
    engine = make_engine()
    group, _ = engine.add(4)
    other, _ = engine.add(4)
    outputs = engine.schedule()
    assert engine.scheduler.abort(group)
    engine.update(outputs, [(0, [7], True), (1, [7], False)])
    assert not engine.scheduler.abort(group)
    assert engine.scheduler.running == [other]
    assert scheduled(engine.step()[0]) == [other]


def test_lack_of_blocks_is_an_answer_and_no_error(make_engine: MakeEngine) -> None:
    for options in ({}, CHUNKED):
        engine = make_engine(options, blocks(4))
        groups = [engine.add(7)[0] for _ in range(5)]
        outputs, _ = engine.step()
        assert set(scheduled(outputs)) == set(groups[:2])
        assert (groups[2], "no_blocks") in outputs.refused
        assert engine.scheduler.waiting == groups[2:]


def test_all_run_again_once_there_is_room_after_a_preemption(make_engine: MakeEngine) -> None:
    engine = make_engine({}, blocks(8))
    groups = [engine.add(7)[0] for _ in range(4)]
    engine.step()
    engine.step()
    outputs, _ = engine.step()
    assert len(outputs.preempted) == 2
    for group in groups[:2]:
        engine.scheduler.abort(group)
    assert set(scheduled(engine.step()[0])) == set(groups[2:])
    for _ in range(3):
        outputs, _ = engine.step()
        assert set(scheduled(outputs)) == set(groups[2:])
        assert not outputs.preempted


@pytest.mark.parametrize("options", [{}, CHUNKED])
def test_who_outgrows_all_memory_ends_at_once_and_keeps_nobody_waiting(
    make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    engine = make_engine(options, blocks(4))
    large, _ = engine.add(15)
    waiting, _ = engine.add(4)
    engine.step()
    while large in engine.scheduler.running:
        outputs, _ = engine.step()
        assert outputs.preempted == [], "it would come back to the same place"
    (ended,) = outputs.ignored_seq_groups
    assert ended[0] == large
    assert "outgrew the KV cache of 4 blocks" in ended[1]
    assert scheduled(outputs) == [waiting], "its blocks are free in the same step"

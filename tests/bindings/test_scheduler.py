"""Bad calls of ``Scheduler``: a named error that says what is wrong, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedserve import KVGroup, Scheduler
from pagedserve.errors import PagedServeError, RequestError, StaleHandleError, StepError

NAN, INFINITY = float("nan"), float("inf")
GOOD_PROMPT = np.arange(3, dtype=np.int32)
GROUP_CALLS = ("seqs_of", "common_computed_blocks", "group_stats")
SEQ_CALLS = ("token_ids", "block_table")


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def flags(*values: int) -> NDArray[np.uint8]:
    return np.array(values, np.uint8)


# Handles


def test_a_handle_that_never_was_is_refused(busy: Any) -> None:
    for handle in (0, -1, 1, 2**62, -(2**63)):
        for call in GROUP_CALLS:
            message = f"no sequence group has the handle {handle}; it has ended, or"
            busy.refuses(StaleHandleError, message, getattr(busy.scheduler, call), handle)
        for call in SEQ_CALLS:
            message = f"no sequence has the handle {handle}; it has ended, or"
            busy.refuses(StaleHandleError, message, getattr(busy.scheduler, call), handle)
        assert not busy.scheduler.abort(handle)


def test_a_handle_that_has_ended_is_refused_also_when_its_place_is_used_again(engine: Any) -> None:
    dead = [engine.add(4) for _ in range(3)]
    for group, _ in dead:
        assert engine.scheduler.abort(group)
    for _ in range(3):
        engine.add(4)
    before = engine.state()
    for group, seq in dead:
        assert not engine.scheduler.abort(group)
        for call in GROUP_CALLS:
            with pytest.raises(StaleHandleError, match=str(group)):
                getattr(engine.scheduler, call)(group)
        for call in SEQ_CALLS:
            with pytest.raises(StaleHandleError, match=str(seq)):
                getattr(engine.scheduler, call)(seq)
    assert engine.state() == before
    assert engine.scheduler.num_waiting == 3


def test_handles_of_outputs_that_finished_and_of_dropped_rows_are_dead(engine: Any) -> None:
    group, seq = engine.add(4, max_num_running_seqs=2)
    first, second = engine.update(engine.schedule(), [(0, [7], False), (0, [8], False)])
    assert second == seq
    rows = [row.seq for row in engine.inputs(engine.schedule())]
    assert sorted(rows) == sorted([first, second])
    handles, ended = engine.scheduler.update(
        1, ints(rows.index(first)), ints(0, 1), ints(9), flags(1)
    )
    assert handles.tolist() == [first]
    assert [ended_group for ended_group, _ in ended] == [group]
    for handle in (first, second):
        engine.refuses(StaleHandleError, str(handle), engine.scheduler.token_ids, handle)
    engine.refuses(StaleHandleError, "group", engine.scheduler.seqs_of, group)


def test_a_group_that_was_ended_by_the_scheduler_is_dead(engine: Any) -> None:
    group, seq = engine.add(65)
    outputs = engine.schedule()
    assert outputs.is_empty
    ((ended, reason, stats),) = outputs.ignored_seq_groups
    assert (ended, reason) == (group, "the prompt has 65 tokens; at most 64 are accepted")
    assert (stats.num_preemptions, stats.num_recomputed_tokens) == (0, 0)
    engine.refuses(StaleHandleError, str(seq), engine.scheduler.token_ids, seq)
    assert not engine.scheduler.abort(group)


# Requests


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.arange(3), "got int64 of shape"),
        (np.zeros(3, np.float32), "got float32 of shape"),
        (np.zeros(3, np.uint32), "got uint32 of shape"),
        (np.zeros(3, ">i4"), "got >i4 of shape"),
        (np.zeros((1, 3), np.int32), r"int32 of shape \[1, 3\]"),
        (np.array(3, np.int32), r"int32 of shape \[\]"),
        (np.zeros(6, np.int32)[::2], "not contiguous"),
        (np.arange(3, dtype=np.int32)[::-1], "not contiguous"),
        ([1, 2, 3], "got a list"),
        (b"\x01\0\0\0", "got a bytes"),
        (None, "got a NoneType"),
    ],
)
def test_a_prompt_of_another_kind_is_refused(busy: Any, prompt: Any, message: str) -> None:
    message = "^token_ids must be a one-dimensional contiguous int32 array; .*" + message
    add = busy.scheduler.add_seq_group
    busy.refuses(PagedServeError, message, add, prompt, arrival_time=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_ids": ints()}, "the prompt is empty; at least one token is needed"),
        ({"token_ids": ints(4, -1)}, "token id -1; ids are at least 0"),
        ({"arrival_time": NAN}, "arrival_time is NaN; it must be finite"),
        ({"arrival_time": INFINITY}, "arrival_time is inf"),
        ({"arrival_time": -INFINITY}, "arrival_time is -inf"),
        ({"max_num_running_seqs": 0}, "is 0; it must be from 1 to max_num_seqs, 8"),
        ({"max_num_running_seqs": 9}, "is 9; it must be from 1 to max_num_seqs, 8"),
    ],
)
def test_a_request_that_cannot_be_is_refused(
    busy: Any, options: dict[str, Any], message: str
) -> None:
    request = {"token_ids": GOOD_PROMPT, "arrival_time": 0.0} | options
    busy.refuses(RequestError, message, busy.scheduler.add_seq_group, **request)


def test_an_adapter_without_slots_is_refused(engine: Any) -> None:
    message = "names adapter 3; max_loras is None, no adapters"
    engine.refuses(RequestError, message, engine.add, 4, adapter=3)


@pytest.mark.parametrize(
    "option",
    [
        {"max_num_running_seqs": -1},
        {"num_encoder_tokens": -1},
        {"adapter": -1},
        {"adapter": 2**32},
        {"salt": -1},
        {"salt": 2**64},
        {"priority": 2**63},
        {"max_num_running_seqs": 1.5},
        {"arrival_time": "now"},
        {"speed": 1},
    ],
)
def test_an_option_out_of_its_type_is_refused(busy: Any, option: dict[str, Any]) -> None:
    # What no integer of the option's width holds is Python's error; its note names the option.
    error = (PagedServeError, OverflowError, TypeError)
    before = busy.state()
    with pytest.raises(error) as refusal:
        busy.add(4, **option)
    text = " ".join([str(refusal.value), *getattr(refusal.value, "__notes__", ())])
    assert next(iter(option)) in text
    assert busy.state() == before


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("num_tokens", [2**31 - 1, 300])
def test_an_encoder_that_no_memory_holds_ends_its_request_alone(
    make_engine: Callable[..., Any], block_size: int, num_tokens: int
) -> None:
    engine = make_engine({}, {"block_size": block_size, "groups": [KVGroup("cross")]})
    group, _ = engine.add(4, num_encoder_tokens=num_tokens)
    ignored = engine.schedule().ignored_seq_groups
    assert [ended for ended, _, _ in ignored] == [group]
    assert "raise num_gpu_blocks" in ignored[0][1]
    assert not engine.scheduler.has_unfinished
    engine.scheduler.check()


@pytest.mark.parametrize("num_tokens", [2**31, 2**32, 2**62, 2**63 - 1])
def test_more_encoder_tokens_than_can_be_counted_are_refused(busy: Any, num_tokens: int) -> None:
    before = busy.state()
    with pytest.raises(RequestError, match=f"num_encoder_tokens is {num_tokens}; .* 2147483647"):
        busy.add(4, num_encoder_tokens=num_tokens)
    assert busy.state() == before


def test_a_prompt_that_is_only_read_may_be_read_only(engine: Any) -> None:
    prompt = np.arange(5, dtype=np.int32)
    prompt.flags.writeable = False
    _, seq = engine.scheduler.add_seq_group(prompt, arrival_time=0.0)
    assert engine.scheduler.token_ids(seq).tolist() == [0, 1, 2, 3, 4]


# The order of calls, and the clock


@pytest.mark.parametrize("now", [NAN, INFINITY, -INFINITY, -1.0, 0.999])
def test_a_clock_that_is_none_or_runs_backwards_is_refused(busy: Any, now: float) -> None:
    message = r"now is (NaN|-?inf|-1|0\.999); it must be finite and not before the last step's 1"
    busy.refuses(StepError, message, busy.scheduler.schedule, now)
    assert not busy.schedule().is_empty


def test_a_clock_may_stand_still(busy: Any) -> None:
    outputs = busy.scheduler.schedule(1.0)
    assert outputs.step_id == 1


def test_a_second_step_is_refused_while_one_is_open(busy: Any) -> None:
    outputs = busy.schedule()
    message = f"step {outputs.step_id} is open; finish it with update or abandon"
    busy.refuses(StepError, message, busy.scheduler.schedule, 9.0)
    busy.update(outputs, [(row, [1], False) for row in range(outputs.num_rows)])


@pytest.mark.parametrize("call", ["update", "abandon"])
def test_a_step_ends_once_and_only_if_it_was_begun(busy: Any, call: str) -> None:
    def end(step_id: int) -> None:
        if call == "abandon":
            busy.scheduler.abandon(step_id)
        else:
            busy.scheduler.update(step_id, ints(0), ints(0, 1), ints(1), flags(0))

    for step_id in (0, 1, 2**63):
        busy.refuses(StepError, f"step {step_id} cannot be ended: no step", end, step_id)
    outputs = busy.schedule()
    for step_id in (outputs.step_id - 1, outputs.step_id + 1):
        message = f"step {step_id} cannot be ended: step {outputs.step_id} is open"
        busy.refuses(StepError, message, end, step_id)
    end(outputs.step_id)
    busy.refuses(StepError, "no step is open", end, outputs.step_id)


def test_an_empty_step_awaits_no_update(engine: Any) -> None:
    outputs = engine.schedule()
    assert outputs.is_empty
    scheduler = engine.scheduler
    engine.refuses(StepError, "no step is open", scheduler.abandon, outputs.step_id)
    engine.refuses(StepError, "no step is open", scheduler.prepare_inputs, engine.buffers)


# Results


@pytest.mark.parametrize("name", ["parent_rows", "token_start", "tokens", "finish"])
def test_results_of_another_kind_are_refused(busy: Any, name: str) -> None:
    outputs = busy.schedule()
    assert outputs.num_rows == 4
    good: dict[str, Any] = {
        "parent_rows": ints(0, 1, 2, 3),
        "token_start": ints(0, 1, 2, 3, 4),
        "tokens": ints(5, 6, 7, 8),
        "finish": flags(0, 0, 0, 1),
    }
    array = good[name]
    bad: list[Any] = [
        array.astype(np.int64),
        array.astype(np.float64),
        array.astype(bool),
        array.astype(np.uint16),
        array.reshape(1, -1),
        np.repeat(array, 2)[::2],
        array[::-1],
        array.tolist(),
        None,
    ]
    wanted = array.dtype.name
    for value in bad:
        message = f"^{name} must be a one-dimensional contiguous {wanted} array; got "
        results = good | {name: value}
        busy.refuses(StepError, message, busy.scheduler.update, outputs.step_id, **results)
    handles, _ = busy.scheduler.update(outputs.step_id, **good)
    assert len(handles) == 4


def test_unaligned_results_are_refused_by_name(busy: Any) -> None:
    outputs = busy.schedule()
    tokens = np.frombuffer(bytearray(17), np.int32, count=4, offset=1)
    assert not tokens.flags.aligned
    results = (ints(0, 1, 2, 3), ints(0, 1, 2, 3, 4), tokens, flags(0, 0, 0, 0))
    update = busy.scheduler.update
    busy.refuses(StepError, "^tokens must be", update, outputs.step_id, *results)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (([0], [0], [5], [0]), "1 parent_rows need 1 finish and 2 token_start entries"),
        (([0], [0, 1], [5], []), "there are 0 and 2"),
        (([0], [0, 1], [5], [0, 0]), "there are 2 and 2"),
        (([], [], [], []), "0 parent_rows need 0 finish and 1 token_start"),
        (([0], [0, 1, 1], [5], [0]), "there are 1 and 3"),
        (([], [0], [5], []), "token_start must increase from 0 to 1, the number of tokens"),
        (([0], [1, 2], [5, 6], [0]), "must increase from 0 to 2"),
        (([0], [0, 1], [5, 6], [0]), "must increase from 0 to 2"),
        (([0], [0, 2], [5], [0]), "must increase from 0 to 1"),
        (([0], [0, 0], [], [0]), "must increase from 0 to 0"),
        (([0], [-1, 1], [5], [0]), "must increase from 0 to 1"),
        (([0], [0, -1], [5], [0]), "must increase from 0 to 1"),
        (([0, 1], [0, 2, 1], [5], [0, 0]), "must increase from 0 to 1"),
        (([0], [0, 2**31 - 1], [5], [0]), "must increase from 0 to 1"),
        (([0], [0, 1], [-5], [0]), "tokens holds -5; ids are at least 0"),
        (([4], [0, 1], [5], [0]), "names row 4, which is not among the 4 sampled of 4 rows"),
        (([-1], [0, 1], [5], [0]), "-1"),
        (([2**31 - 1], [0, 1], [5], [0]), "names row 2147483647"),
        (([-(2**31)], [0, 1], [5], [0]), "-2147483648"),
        (([1, 0], [0, 1, 2], [5, 6], [0, 0]), "must not decrease; 0 follows 1"),
        (([3], [0, 2], [5, 6], [0]), "an output of row 3 has 2 tokens; it may have 1"),
        (
            ([0, 0], [0, 1, 2], [5, 6], [0, 0]),
            "2 outputs of one group live on; it may continue with 1",
        ),
        (([1, 1, 2, 3], [0, 1, 2, 3, 4], [5] * 4, [0] * 4), "4 outputs .* continue with 3"),
    ],
)
def test_results_that_do_not_belong_to_the_step_are_refused(
    busy: Any, results: tuple[list[int], ...], message: str
) -> None:
    outputs = busy.schedule()
    assert outputs.num_samples == 4
    arrays = (*(ints(*values) for values in results[:3]), flags(*results[3]))
    busy.refuses(StepError, message, busy.scheduler.update, outputs.step_id, *arrays)
    busy.update(outputs, [(row, [5], False) for row in range(4)])


def test_rows_that_stop_before_their_end_take_no_output(make_engine: Callable[..., Any]) -> None:
    engine = make_engine({"enable_chunked_prefill": True, "max_num_batched_tokens": 8})
    engine.add(12)
    outputs = engine.schedule()
    assert (outputs.num_rows, outputs.num_samples) == (1, 0)
    message = "names row 0, which is not among the 0 sampled of 1 rows"
    engine.refuses(StepError, message, engine.update, outputs, [(0, [5], False)])
    engine.update(outputs, [])


def test_nothing_lives_on_beyond_the_model_length(engine: Any) -> None:
    engine.add(64)
    outputs = engine.schedule()
    message = "an output of row 0 lives on beyond max_model_len, 64"
    engine.refuses(StepError, message, engine.update, outputs, [(0, [5], False)])
    engine.update(outputs, [(0, [5], True)])
    assert not engine.scheduler.has_unfinished


def test_a_scheduler_is_made_from_configurations_alone() -> None:
    with pytest.raises(TypeError):
        Scheduler({"max_num_seqs": 4}, {"block_size": 4})  # type: ignore[arg-type]


# What a group has been through


def test_a_prompt_that_can_never_run_is_refused_in_a_sentence_without_a_subject(
    make_engine: Callable[..., Any],
) -> None:
    scheduler = make_engine({"max_model_len": 32}, {}).scheduler
    assert scheduler.prompt_refusal(31) is None
    assert scheduler.prompt_refusal(40) == (
        "has 40 tokens; max_model_len is 32, so at most 31 leave space for a new one"
    )
    with pytest.raises(RequestError, match="num_tokens is -1"):
        scheduler.prompt_refusal(-1)


def test_what_a_group_has_been_through_is_told_with_its_end(engine: Any) -> None:
    group, _ = engine.add(5)
    engine.step()
    engine.scheduler.abandon(engine.schedule().step_id)
    stats = engine.scheduler.group_stats(group)
    assert (stats.num_preemptions, stats.num_recomputed_tokens, stats.num_cached_tokens) == (
        0,
        5,
        0,
    )
    assert engine.scheduler.abort(group) == stats
    assert engine.scheduler.abort(group) is None

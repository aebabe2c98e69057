"""Configurations from Python: what is refused, by which name, and what the options become."""

import copy
import inspect
from typing import Any

import pytest

from pagedserve import (
    CacheChoices,
    CacheConfig,
    KVGroup,
    Scheduler,
    SchedulerChoices,
    SchedulerConfig,
)
from pagedserve.errors import ConfigError

CACHE: dict[str, Any] = {"block_size": 4, "num_gpu_blocks": 8}
SCHEDULER: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
}
# The other way than the default, each.
CACHE_CHOICES = {
    "count_cached_blocks": False,
    "charge_cached_tokens": True,
    "share_partial_blocks": True,
    "share_generated_blocks": False,
    "swap_in_cached_blocks": True,
    "evict_blank_blocks_in_order": True,
    "exact_append_demand": False,
}
SCHEDULER_CHOICES = {
    "admit_after_preemption": True,
    "reverse_swapped_order": True,
    "whole_block_chunks": True,
    "limit_chunked_prompts": False,
    "drain_adapters": False,
}
ALL_CHOICES = [(CacheChoices, CACHE_CHOICES), (SchedulerChoices, SCHEDULER_CHOICES)]
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("make", [CacheConfig, CacheConfig.classic])
@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("block_size", 0, "at least 1"),
        ("block_size", -1, "not be negative"),
        ("block_size", 2**31, "at most 2147483647"),
        ("num_gpu_blocks", 0, "at least 1"),
        ("num_gpu_blocks", -8, "not be negative"),
        ("num_gpu_blocks", 2**31, "at most 2147483647"),
        ("num_cpu_blocks", -1, "not be negative"),
        ("num_cpu_blocks", 2**31, "at most 2147483647"),
        ("sliding_window", 0, "at least 1"),
        ("sliding_window", -4, "not be negative"),
        ("watermark", -0.1, "at least 0 and below 1"),
        ("watermark", 1.0, "at least 0 and below 1"),
        ("watermark", NAN, "at least 0 and below 1"),
        ("watermark", INFINITY, "at least 0 and below 1"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_by_field(
    make: Any, field: str, value: Any, accepted: str
) -> None:
    given = rf"{value:g}" if isinstance(value, float) else str(value)
    with pytest.raises(ConfigError, match=rf"(?i)^{field} is {given}; it must .*{accepted}"):
        make(**CACHE | {field: value})


@pytest.mark.parametrize("make", [SchedulerConfig, SchedulerConfig.classic])
@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_seqs", -1, "not be negative"),
        ("max_num_batched_tokens", -1, "not be negative"),
        ("max_num_batched_tokens", 2**31, "at most 2147483647"),
        ("max_model_len", 0, "at least 1"),
        ("max_model_len", -5, "not be negative"),
        ("max_model_len", 2**31, "at most 2147483647"),
        ("num_lookahead_slots", -1, "not be negative"),
        ("num_lookahead_slots", 2**31, "at most 2147483647"),
        ("max_loras", 0, "at least 1 or None"),
        ("max_loras", -1, "not be negative"),
        ("delay_factor", -1.0, "finite and at least 0"),
        ("delay_factor", NAN, "finite and at least 0"),
        ("delay_factor", INFINITY, "finite and at least 0"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_field(
    make: Any, field: str, value: Any, accepted: str
) -> None:
    given = rf"{value:g}" if isinstance(value, float) else str(value)
    with pytest.raises(ConfigError, match=rf"(?i)^{field} is {given}; it must .*{accepted}"):
        make(**SCHEDULER | {field: value})


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("policy", ["fcfs", "priority"]),
        ("preemption_mode", ["recompute", "swap"]),
        ("victim_policy", ["last", "least_work"]),
    ],
)
def test_names_are_given_and_unknown_ones_answered_with_all_of_them(
    field: str, names: list[str]
) -> None:
    for name in names:
        assert getattr(SchedulerConfig(**SCHEDULER | {field: name}), field) == name
    with pytest.raises(ConfigError, match=f'^{field} is "Fcfs"') as refusal:
        SchedulerConfig(**SCHEDULER | {field: "Fcfs"})
    assert all(f'"{name}"' in str(refusal.value) for name in names)


def test_a_negative_number_of_bypasses_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_bypasses is -1"):
        SchedulerConfig(**SCHEDULER, max_num_bypasses=-1)


def test_a_group_is_refused_where_it_cannot_be() -> None:
    group = KVGroup("window", window=9, num_gpu_blocks=30)
    chunks = KVGroup("chunked", window=9, num_gpu_blocks=30)
    for each in (group, chunks):
        with pytest.raises(ConfigError, match="a window and sliding_window exclude each other"):
            CacheConfig(**CACHE, groups=[each], sliding_window=8)
    states = KVGroup("state", num_gpu_blocks=3)
    with pytest.raises(ConfigError, match="states and enable_prefix_caching exclude each other"):
        CacheConfig(**CACHE, groups=[states], enable_prefix_caching=True)
    limits = SchedulerConfig(**SCHEDULER)
    with pytest.raises(ConfigError, match="is 3, below max_num_seqs, 4"):
        Scheduler(limits, CacheConfig(**CACHE, groups=[states]))
    block_size = CACHE["block_size"]
    least = KVGroup.num_gpu_blocks_for(limits, window=9, block_size=block_size)
    fewer = KVGroup("window", window=9, num_gpu_blocks=least - 1)
    with pytest.raises(ConfigError, match=f"need {least}"):
        Scheduler(limits, CacheConfig(**CACHE, groups=[fewer]))
    more = KVGroup.num_gpu_blocks_for(limits, window=9, block_size=block_size, num_sink_tokens=9)
    assert more == least + -(-9 // block_size)
    enough = KVGroup("window", window=9, num_gpu_blocks=least)
    Scheduler(limits, CacheConfig(**CACHE, groups=[enough])).check()


def test_a_group_needs_what_belongs_to_its_kind() -> None:
    with pytest.raises(ConfigError, match="window is missing"):
        KVGroup("window", num_gpu_blocks=30)
    with pytest.raises(ConfigError, match='window is missing: the kind is "chunked"'):
        KVGroup("chunked", num_gpu_blocks=30)
    with pytest.raises(ConfigError, match='window is 9: the kind "state" has none'):
        KVGroup("state", window=9, num_gpu_blocks=30)
    with pytest.raises(ConfigError, match='num_sink_tokens is 4: the kind "state" has none'):
        KVGroup("state", num_sink_tokens=4, num_gpu_blocks=30)
    with pytest.raises(ConfigError, match="num_sink_tokens is -1; it must not be negative"):
        KVGroup("window", window=9, num_sink_tokens=-1, num_gpu_blocks=30)
    with pytest.raises(ConfigError, match='must be "window", "chunked", "state" or "cross"'):
        KVGroup("all", num_gpu_blocks=30)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the window of a KV group is 0"):
        KVGroup("window", window=0, num_gpu_blocks=30)
    group = KVGroup("window", window=9, num_gpu_blocks=30, num_cpu_blocks=4)
    assert copy.copy(group) == group


def test_a_window_excludes_prefix_caching() -> None:
    for make in (CacheConfig, CacheConfig.classic):
        with pytest.raises(ConfigError, match="sliding_window and enable_prefix_caching exclude"):
            make(**CACHE, sliding_window=8, enable_prefix_caching=True)


def test_a_step_has_room_for_a_token_of_every_sequence() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 3, below max_num_seqs, 4"):
        SchedulerConfig(**SCHEDULER | {"max_num_batched_tokens": 3})


def test_whole_block_chunks_ask_for_a_budget_of_whole_blocks() -> None:
    limits = SCHEDULER | {"max_num_batched_tokens": 34, "enable_chunked_prefill": True}
    cache = CacheConfig.classic(**CACHE, enable_prefix_caching=True)
    with pytest.raises(ConfigError, match=r"is 34; .*multiple of block_size, 4"):
        Scheduler(SchedulerConfig.classic(**limits), cache)
    Scheduler(SchedulerConfig(**limits), cache)
    Scheduler(SchedulerConfig.classic(**limits), CacheConfig.classic(**CACHE))


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (CacheConfig, CACHE | {"block_size": "4"}),
        (CacheConfig, CACHE | {"block_size": 4.0}),
        (CacheConfig, CACHE | {"enable_prefix_caching": 1}),
        (CacheConfig, CACHE | {"speed": 1}),
        (CacheConfig, CACHE | {"choices": SchedulerChoices()}),
        (CacheConfig, CACHE | CACHE_CHOICES),
        (CacheChoices, {"exact_append_demand": 1}),
        (CacheChoices, SCHEDULER_CHOICES),
        (CacheConfig, {"block_size": 4}),
        (SchedulerConfig, SCHEDULER | {"policy": 1}),
        (SchedulerConfig, SCHEDULER | {"max_loras": "2"}),
        (SchedulerConfig, SCHEDULER | {"speed": 1}),
        (SchedulerConfig, SCHEDULER | {"choices": SCHEDULER_CHOICES}),
        (SchedulerConfig, SCHEDULER | SCHEDULER_CHOICES),
        (SchedulerChoices, {"whole_block_chunks": "yes"}),
        (SchedulerChoices, {"max_num_bypasses": 0}),
        (SchedulerConfig, {"max_num_seqs": 4}),
    ],
)
def test_other_types_and_names_are_a_type_error(make: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        make(**arguments)


def test_positions_are_no_way_to_give_a_limit() -> None:
    with pytest.raises(TypeError, match="positional"):
        SchedulerConfig(4, 32, 64)  # type: ignore[call-arg]


def test_every_field_reads_back() -> None:
    scheduler: dict[str, Any] = SCHEDULER | {
        "preemption_mode": "swap",
        "enable_chunked_prefill": True,
        "policy": "priority",
        "delay_factor": 0.25,
        "num_lookahead_slots": 3,
        "max_loras": 2,
        "max_num_bypasses": 7,
        "victim_policy": "least_work",
        "choices": SchedulerChoices(**SCHEDULER_CHOICES),
    }
    group: dict[str, Any] = {
        "kind": "window",
        "window": 9,
        "num_sink_tokens": 5,
        "num_gpu_blocks": 30,
        "num_cpu_blocks": 4,
    }
    states: dict[str, Any] = {"kind": "state", "num_gpu_blocks": 6, "num_cpu_blocks": 3}
    chunks: dict[str, Any] = states | {"kind": "chunked", "window": 32}
    cache: dict[str, Any] = CACHE | {
        "num_cpu_blocks": 5,
        "watermark": 0.125,
        "enable_prefix_caching": True,
        "sliding_window": None,
        "groups": [KVGroup(**group), KVGroup("cross")],
        "choices": CacheChoices(**CACHE_CHOICES),
    }
    made: list[tuple[Any, dict[str, Any]]] = [
        (SchedulerConfig(**scheduler), scheduler),
        (CacheConfig(**cache), cache),
        (CacheConfig(**CACHE, sliding_window=12), CACHE | {"sliding_window": 12}),
        (KVGroup(**group), group),
        (KVGroup(**chunks), chunks),
        (KVGroup(**states), states | {"window": None, "num_sink_tokens": 0}),
    ]
    for config, values in made:
        for field, value in values.items():
            assert getattr(config, field) == value, field
            with pytest.raises(AttributeError):
                setattr(config, field, value)
    public = {name for name in dir(SchedulerConfig) if not name.startswith("_")} - {"classic"}
    assert public == scheduler.keys(), "a new option is to be read back here"
    assert {name for name in dir(CacheConfig) if not name.startswith("_")} == {*cache, "classic"}


def test_the_classic_configuration_turns_every_improvement_off() -> None:
    scheduler = SchedulerConfig.classic(**SCHEDULER)
    assert (scheduler.max_num_bypasses, scheduler.victim_policy) == (0, "last")
    assert scheduler.choices == SchedulerChoices.classic()
    cache = CacheConfig.classic(**CACHE, enable_prefix_caching=True)
    assert cache.choices == CacheChoices.classic()
    for make in (SchedulerConfig, SchedulerConfig.classic):
        made = make(**SCHEDULER)
        assert (made.policy, made.preemption_mode, made.max_loras) == ("fcfs", None, None)
        assert (made.delay_factor, made.num_lookahead_slots) == (0.0, 0)


@pytest.mark.parametrize(("make", "classic"), ALL_CHOICES)
def test_each_choice_is_made_alone_and_read_back(make: Any, classic: dict[str, bool]) -> None:
    default = {name: not value for name, value in classic.items()}
    assert {name for name in dir(make) if not name.startswith("_")} == {*classic, "classic"}
    for name, value in classic.items():
        made = make(**{name: value})
        assert {field: getattr(made, field) for field in classic} == default | {name: value}
        assert made not in (make(), make.classic())
        with pytest.raises(AttributeError):
            setattr(made, name, value)


@pytest.mark.parametrize(("make", "classic"), ALL_CHOICES)
def test_choices_compare_and_print_by_their_values(make: Any, classic: dict[str, bool]) -> None:
    assert make(**classic) == make.classic() != make()
    assert make(**dict.fromkeys(classic)) == make()
    fields = ", ".join(f"{name}={value}" for name, value in classic.items())
    assert repr(make.classic()) == f"{make.__name__}({fields})"
    with pytest.raises(TypeError, match="positional"):
        make(True)


def test_what_is_none_has_the_default_of_what_is_left_out() -> None:
    for make, limits in ((SchedulerConfig, {"max_model_len": 64}), (CacheConfig, CACHE)):
        fields = [name for name in dir(make) if not name.startswith("_") and name != "classic"]
        ways: tuple[Any, ...] = (make, make.classic)
        for way in ways:
            accepted = inspect.signature(way).parameters
            nothing = {name: None for name in fields if name in accepted and name not in limits}
            made = way(**limits, **nothing)
            for name in fields:
                assert getattr(made, name) == getattr(way(**limits), name), name


def test_limits_follow_each_other() -> None:
    limits = SchedulerConfig(max_model_len=64)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 2048)
    assert SchedulerConfig(max_model_len=4096).max_num_batched_tokens == 4096
    chunked = SchedulerConfig(max_model_len=4096, enable_chunked_prefill=True)
    assert (chunked.max_num_batched_tokens, chunked.max_num_bypasses) == (512, 64)
    assert SchedulerConfig(max_model_len=64, max_num_seqs=5000).max_num_batched_tokens == 5000

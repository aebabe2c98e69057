"""What lies in the slots, kept by a naive model beside the scheduler.

The model carries out moves and writes as they are told, each token as a hash of all tokens up to
it, and looks at what every row would attend to.  Nothing but the public calls is used.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedserve import KVGroup

BLOCK_SIZE = 4
WINDOW = 10
WINDOW_GROUP = KVGroup("window", window=WINDOW, num_gpu_blocks=60, num_cpu_blocks=9)
SINKS_GROUP = KVGroup("window", window=7, num_sink_tokens=5, num_gpu_blocks=60, num_cpu_blocks=9)
CHUNKED_GROUP = KVGroup("chunked", window=10, num_gpu_blocks=60, num_cpu_blocks=9)
STATES = KVGroup("state", num_gpu_blocks=8, num_cpu_blocks=4)
ENCODERS = KVGroup("cross")

CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"num_cpu_blocks": 10}),
    "chunked": (
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 13, "max_num_bypasses": 2},
        {"num_cpu_blocks": 10, "enable_prefix_caching": True},
    ),
    "cached": ({"max_loras": 2}, {"num_cpu_blocks": 10, "enable_prefix_caching": True}),
    "swap": (
        {"preemption_mode": "swap", "victim_policy": "least_work"},
        {"num_cpu_blocks": 30, "enable_prefix_caching": True},
    ),
    "recompute": ({"preemption_mode": "recompute", "policy": "priority"}, {}),
    "ahead": (
        {"num_lookahead_slots": 3, "enable_chunked_prefill": True},
        {"num_cpu_blocks": 10, "enable_prefix_caching": True},
    ),
    "states": (
        {"preemption_mode": "swap"},
        {"num_cpu_blocks": 12, "groups": [ENCODERS, STATES]},
    ),
    "all kinds": (
        {"preemption_mode": "swap", "enable_chunked_prefill": True},
        {"num_cpu_blocks": 12, "groups": [STATES, ENCODERS, WINDOW_GROUP]},
    ),
    "window group": (
        {"num_lookahead_slots": 2, "preemption_mode": "swap"},
        {"num_cpu_blocks": 12, "groups": [WINDOW_GROUP]},
    ),
    "window group in chunks": (
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 13},
        {"num_cpu_blocks": 12, "groups": [WINDOW_GROUP]},
    ),
    "sink tokens": (
        {"num_lookahead_slots": 2, "preemption_mode": "swap"},
        {"num_cpu_blocks": 12, "groups": [SINKS_GROUP, WINDOW_GROUP]},
    ),
    "sink tokens and cached": (
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 13},
        {"num_cpu_blocks": 12, "groups": [SINKS_GROUP], "enable_prefix_caching": True},
    ),
    "attention chunks": (
        {"num_lookahead_slots": 2, "preemption_mode": "swap"},
        {"num_cpu_blocks": 12, "groups": [CHUNKED_GROUP]},
    ),
    "attention chunks and cached": (
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 13},
        {
            "num_cpu_blocks": 12,
            "groups": [SINKS_GROUP, CHUNKED_GROUP],
            "enable_prefix_caching": True,
        },
    ),
    "window": ({"num_lookahead_slots": 2}, {"num_cpu_blocks": 12, "sliding_window": WINDOW}),
}


def is_seen(group: KVGroup, query: int, key: int) -> bool:
    """Whether a query, or one after it, attends to a key in the layers of a group."""
    assert group.window is not None
    if group.kind == "chunked":
        return key // group.window >= query // group.window
    return key < group.num_sink_tokens or query < key + group.window


# An operation and the small numbers that decide what it does.
OPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "step", "step", "step", "abort", "fail", "reset"]),
        st.lists(st.integers(0, 15), min_size=4, max_size=8),
    ),
    max_size=40,
)


class Model:
    """An engine, and the contents of both tiers as they must be."""

    def __init__(self, engine: Any, *, has_window: bool, groups: list[KVGroup]) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.has_window = has_window
        self.groups = groups
        # What lies in the slots of each group's pool; a state is the one slot of its block.
        self.devices: list[dict[int, int]] = [{} for _ in range(len(groups) + 1)]
        self.hosts: list[dict[int, int]] = [{} for _ in range(len(groups) + 1)]
        # Of each living sequence its key and its tokens; of each group how wide it may be.
        self.tokens: dict[int, tuple[tuple[int, int], list[int]]] = {}
        self.widths: dict[int, list[int]] = {}

    def apply(self, kind: str, numbers: list[int]) -> None:
        fates = cycle(numbers)
        if kind == "add":
            self.add(fates)
        elif kind == "abort" and self.widths:
            groups = list(self.widths)
            self.scheduler.abort(groups[next(fates) % len(groups)])
            self.forget_ended()
        elif kind == "reset":
            self.scheduler.reset_prefix_cache()
        elif kind in {"step", "fail"}:
            self.step(fates, fails=kind == "fail")
        self.scheduler.check()

    def add(self, fates: Iterator[int]) -> None:
        length, first, width = 1 + 3 * next(fates), next(fates) % 2, 1 + next(fates) % 3
        key = (next(fates) % 3 if self.engine.has_adapters else 0, next(fates) % 2)
        prompt = [first, *range(1, length)]
        group, seq = self.engine.add(
            prompt,
            max_num_running_seqs=width,
            adapter=key[0],
            salt=key[1],
            priority=next(fates) % 3,
            # A salt names its input.
            num_encoder_tokens=5 * (next(fates) % 2) * key[1] * (ENCODERS in self.groups),
        )
        self.tokens[seq] = key, prompt
        self.widths[group] = [width, 1]

    def step(self, fates: Iterator[int], *, fails: bool) -> None:
        outputs = self.engine.schedule()
        for group, _, _ in outputs.ignored_seq_groups:
            del self.widths[group]
        self.move(outputs)
        if outputs.is_empty:
            return
        rows = self.engine.inputs(outputs)
        for row in rows:
            self.write(row)
        for row in rows:
            self.attend(row)
            self.go_on(row)
        if fails:
            self.scheduler.abandon(outputs.step_id)
        else:
            self.sample(outputs, rows, fates)
        self.forget_ended()

    def move(self, outputs: Any) -> None:
        sizes = [BLOCK_SIZE, *(1 if group is STATES else BLOCK_SIZE for group in self.groups)]
        pools = zip(outputs.moves, sizes, self.devices, self.hosts, strict=True)
        for moves, size, device, host in pools:
            for pairs, source, target in (
                (moves.swap_out, device, host),
                (moves.swap_in, host, device),
                (moves.copy, device, device),
            ):
                moved = {
                    there * size + offset: source.get(here * size + offset, 0)
                    for here, there in pairs.tolist()
                    for offset in range(size)
                }
                target.update(moved)

    def content(self, seq: int, position: int) -> int:
        key, tokens = self.tokens[seq]
        return hash((key, *tokens[: position + 1]))

    def write(self, row: Any) -> None:
        _, tokens = self.tokens[row.seq]
        assert row.token_ids == [tokens[position] for position in row.positions]
        assert row.positions == list(range(row.positions[0], row.num_keys))
        for position, slot in zip(row.positions, row.slots, strict=True):
            if slot >= 0:
                assert slot == self.slot(row.table, position)
                self.devices[0][slot] = self.content(row.seq, position)
        for index, table in self.windows(row):
            for position, slot in zip(row.positions, row.group_slots[index], strict=True):
                assert slot == self.slot(table, position)
                self.devices[index + 1][slot] = self.content(row.seq, position)

    def windows(self, row: Any) -> Iterator[tuple[int, list[int]]]:
        """Each group with a window or chunks, and the row's table there."""
        for index, group in enumerate(self.groups):
            if group.window is not None:
                yield index, row.group_tables[index]

    def slot(self, table: list[int], position: int) -> int:
        return table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def attend(self, row: Any) -> None:
        first = max(0, row.num_keys - WINDOW) if self.has_window else 0
        for position in range(first, row.num_keys):
            found = self.devices[0].get(self.slot(row.table, position), 0)
            assert found == self.content(row.seq, position), f"position {position}"
        for index, table in self.windows(row):
            for position in range(row.num_keys):
                if not is_seen(self.groups[index], row.positions[0], position):
                    continue
                found = self.devices[index + 1].get(self.slot(table, position), 0)
                assert found == self.content(row.seq, position), f"position {position}"

    def go_on(self, row: Any) -> None:
        if STATES not in self.groups:
            return
        index = self.groups.index(STATES)
        states, [slot] = self.devices[index + 1], row.group_tables[index]
        first = row.positions[0]
        if first:
            assert states[slot] == self.content(row.seq, first - 1)
        states[slot] = self.content(row.seq, row.num_keys - 1)

    def sample(self, outputs: Any, rows: list[Any], fates: Iterator[int]) -> None:
        results: list[tuple[int, list[int], bool]] = []
        row = 0
        for group in outputs.scheduled_seq_groups:
            own = range(row, row + group.num_rows)
            row += group.num_rows
            if group.is_sampled:
                results += self.results_of(group.group, own, outputs, rows, fates)
        parents = [rows[parent].seq for parent, _, _ in results]
        before = {seq: self.tokens[seq] for seq in parents}
        for index, sampled in enumerate(rows):
            if sampled.is_sampled and index not in {parent for parent, _, _ in results}:
                del self.tokens[sampled.seq]
        handles = self.engine.update(outputs, results)
        for handle, (parent, tokens, is_last) in zip(handles, results, strict=True):
            key, known = before[rows[parent].seq]
            self.tokens[handle] = key, [*known, *tokens]
            # The model ran on all accepted tokens but the last, in the slots kept for them.
            for position in range(len(known), len(known) + len(tokens) - 1):
                content, row = self.content(handle, position), rows[parent]
                self.devices[0][self.slot(row.table, position)] = content
                for index, table in self.windows(row):
                    self.devices[index + 1][self.slot(table, position)] = content
            if is_last:
                del self.tokens[handle]
            else:
                assert self.scheduler.token_ids(handle).tolist() == self.tokens[handle][1]

    def results_of(
        self, group: int, own: range, outputs: Any, rows: list[Any], fates: Iterator[int]
    ) -> Iterator[tuple[int, list[int], bool]]:
        width = self.widths[group]
        limit = width[0] if width[1] < width[0] else len(own)
        for row in own:
            fate = next(fates)
            num_outputs = {0: 0, 1: 2, 2: 3}.get(fate, 1)
            most = outputs.num_lookahead_slots if row >= outputs.num_prefill_rows else 0
            num_tokens = 1 + (fate % (most + 1) if num_outputs == 1 else 0)
            length = len(self.tokens[rows[row].seq][1]) + num_tokens
            width[1] += max(0, num_outputs - 1)
            for token in range(num_outputs):
                is_last = length > 40 or limit == 0 or next(fates) == 15
                limit -= not is_last
                yield row, [token + index for index in range(num_tokens)], is_last

    def forget_ended(self) -> None:
        living = {*self.scheduler.waiting, *self.scheduler.running, *self.scheduler.swapped}
        self.widths = {group: width for group, width in self.widths.items() if group in living}

    def drain(self) -> None:
        for _ in range(500):
            if not self.scheduler.has_unfinished:
                return
            self.step(cycle([5, 15, 7]), fails=False)
        pytest.fail("work is left after 500 steps")


@pytest.mark.parametrize("options", CONFIGURATIONS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ops=OPS)
def test_every_row_attends_to_its_own_tokens(
    options: str, ops: list[tuple[str, list[int]]], make_engine: Callable[..., Any]
) -> None:
    for_scheduler, for_cache = CONFIGURATIONS[options]
    engine = make_engine(for_scheduler, {"num_gpu_blocks": 14} | for_cache)
    engine.has_adapters = "max_loras" in for_scheduler
    model = Model(
        engine,
        has_window="sliding_window" in for_cache,
        groups=for_cache.get("groups", []),
    )
    for kind, numbers in ops:
        model.apply(kind, numbers)
    model.drain()
    assert engine.scheduler.num_free_gpu_blocks == 14
    assert engine.scheduler.num_free_cpu_blocks == for_cache.get("num_cpu_blocks", 0)

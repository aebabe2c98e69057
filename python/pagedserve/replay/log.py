"""Replay of decision logs: the same events on a new scheduler, with its decisions compared."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pagedserve._core import (
    CacheChoices,
    CacheConfig,
    KVGroup,
    Scheduler,
    SchedulerChoices,
    SchedulerConfig,
    SchedulerOutputs,
)
from pagedserve.errors import PagedServeError
from pagedserve.replay import older
from pagedserve.replay.log_lines import LogLines
from pagedserve.replay.scenario import ScenarioError

# Version of the log format, and the older one that is understood too.
_FORMAT = 4
_OLDER = 3

# Fields of a line with the step's decisions.
_DECISIONS = (
    "step",
    "scheduled",
    "preempted",
    "swapped_in",
    "moves",
    "group_moves",
    "adapters_to_load",
    "ignored",
    "refused",
    "free",
)

# Exceptions raised by values of a wrong type.
_MALFORMED = (AttributeError, LookupError, OverflowError, TypeError, ValueError)


class LogReplay(NamedTuple):
    """Result of replaying a log.

    Attributes:
        num_steps: Number of steps with equal decisions.
        difference: The first difference; None if there is none.
        is_cut: Whether the last line is truncated, as after a crash; it was ignored.
    """

    num_steps: int
    difference: str | None
    is_cut: bool


def replay_log(path: Path) -> LogReplay:
    """Replay a log.

    Args:
        path: A file written by ``Scheduler(log=...)``, gzipped if it ends in .gz; for a log in a
            directory its last file.

    Raises:
        ScenarioError: Not a log, one of another format or without its first part, or one with an
            invalid line, except for a truncated last one.
    """
    log = LogLines(path)
    lines = iter(log)
    _, header = next(lines, ("", {}))
    if "log" not in header:
        raise ScenarioError(f"{path} does not begin with a decision log's first line")
    is_older = header["log"] == _OLDER
    if header["log"] != _FORMAT and not is_older:
        raise ScenarioError(
            f"{path}: the format is {header['log']!r}; {_OLDER} and {_FORMAT} are understood"
        )
    try:
        player = _Player(older.header(header) if is_older else header)
    except (KeyError, TypeError) as error:
        raise ScenarioError(f"{path} does not hold both configurations: {error!r}") from error
    num_steps = 0
    for place, line in lines:
        try:
            difference = _difference(player, older.line(line, header) if is_older else line)
        except _MALFORMED as error:
            raise ScenarioError(f"{place} is not a step: {error!r}") from error
        if difference:
            return LogReplay(num_steps, difference, log.is_cut)
        num_steps += "step" in line
    return LogReplay(num_steps, None, log.is_cut)


def _difference(player: "_Player", line: dict[str, Any]) -> str | None:
    # A flushed log has lines with events only.
    events_alone = set(line) == {"events"}
    where = "the end" if events_alone else f"step {line['step']}"
    try:
        player.tell(line["events"])
    except PagedServeError as error:
        return f"{where}, events: {error}"
    if events_alone:
        return None
    ours = player.schedule(line["now"])
    theirs = {"group_moves": [[0, 0, 0]] * len(ours["group_moves"]), "adapters_to_load": []} | line
    for key in _DECISIONS:
        if ours[key] != theirs[key]:
            return f"step {line['step']}, {key}: {ours[key]} now, {theirs[key]} in the log"
    return None


def _parts(cache: dict[str, Any]) -> dict[str, Any]:
    """Parse the nested objects of a cache configuration."""
    return {
        "choices": CacheChoices(**cache["choices"]),
        "groups": [KVGroup(**group) for group in cache["groups"]],
    }


class _Player:
    """A scheduler that executes the events of a log."""

    def __init__(self, header: dict[str, Any]) -> None:
        scheduler, cache = header["scheduler"], header["cache"]
        self._scheduler = Scheduler(
            SchedulerConfig(**scheduler | {"choices": SchedulerChoices(**scheduler["choices"])}),
            CacheConfig(**cache | _parts(cache)),
        )
        self._step: SchedulerOutputs | None = None
        self._play: dict[str, Callable[..., None]] = {
            "add": self._add,
            "abort": self._abort,
            "update": self._update,
            "update_async": self._update_async,
            "resolve_tokens": self._resolve_tokens,
            "abandon": self._abandon,
            "reset_prefix_cache": self._reset_prefix_cache,
        }

    def tell(self, events: list[list[Any]]) -> None:
        """Repeat the events of the logged scheduler."""
        for kind, *arguments in events:
            self._play[kind](*arguments)

    def schedule(self, now: float) -> dict[str, Any]:
        """Schedule the next step and return its line of the log."""
        self._step = step = self._scheduler.schedule(now)
        moves = [[len(of.swap_out), len(of.swap_in), len(of.copy)] for of in step.moves]
        return {
            "step": step.step_id,
            "scheduled": [
                [entry.group, entry.token_chunk_size, entry.is_prefill, entry.num_rows]
                for entry in step.scheduled_seq_groups
            ],
            "preempted": [list(entry) for entry in step.preempted],
            "swapped_in": step.swapped_in,
            "moves": moves[0],
            "group_moves": moves[1:],
            "adapters_to_load": [list(load) for load in step.adapters_to_load],
            "ignored": [[group, reason] for group, reason, _ in step.ignored_seq_groups],
            "refused": [list(entry) for entry in step.refused],
            "free": [self._scheduler.num_free_gpu_blocks, self._scheduler.num_free_cpu_blocks],
        }

    def _add(self, request: dict[str, Any]) -> None:
        options = {
            key: value
            for key, value in request.items()
            if key not in ("group", "token_ids", "branches")
        }
        branches = request.get("branches", ())
        options["branches"] = [np.array(branch, dtype=np.int32) for branch in branches]
        token_ids = np.array(request["token_ids"], dtype=np.int32)
        group, _ = self._scheduler.add_seq_group(token_ids, **options)
        if group != request["group"]:
            raise ScenarioError(f"the log names group {request['group']}; it became {group}")

    def _abort(self, group: int) -> None:
        if self._scheduler.abort(group) is None:
            raise ScenarioError(f"the log aborts group {group}, which has ended")

    def _update(
        self,
        tokens: list[int],
        finished: list[int],
        parent_rows: list[int] | None = None,
        token_start: list[int] | None = None,
    ) -> None:
        if self._step is None:
            raise ScenarioError("the log updates a step before the first")
        if parent_rows is None or token_start is None:
            parent_rows = self._sampled_rows(self._step)
            token_start = list(range(len(tokens) + 1))
        finish = np.zeros(len(parent_rows), dtype=np.uint8)
        finish[finished] = 1
        self._scheduler.update(
            self._step.step_id,
            np.array(parent_rows, dtype=np.int32),
            np.array(token_start, dtype=np.int32),
            np.array(tokens, dtype=np.int32),
            finish,
        )

    @staticmethod
    def _sampled_rows(step: SchedulerOutputs) -> list[int]:
        groups = step.scheduled_seq_groups
        starts = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
        spans = zip(groups, pairwise(starts), strict=True)
        return [row for group, span in spans if group.is_sampled for row in range(*span)]

    def _update_async(self) -> None:
        if self._step is None or not self._scheduler.update_async(self._step.step_id):
            raise ScenarioError("the log ends a step before its tokens that has to wait for them")

    def _resolve_tokens(self, step_id: int, tokens: list[int]) -> None:
        self._scheduler.resolve_tokens(step_id, np.array(tokens, dtype=np.int32))

    def _abandon(self, step_id: int) -> None:
        self._scheduler.abandon(step_id)

    def _reset_prefix_cache(self) -> None:
        if not self._scheduler.reset_prefix_cache():
            raise ScenarioError("the log resets the prefix cache, which is in use")

"""First difference of two runs of a scenario, by step and key."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedserve.replay.driver import Row
from pagedserve.replay.scenario import ScenarioError, read_text

# Block numbers follow from the order in which blocks are freed, which is not a decision.
_NOT_COMPARED = frozenset({"blocks"})

# Fields that vLLM 0.6.2 has sorted by adapter and request id when they are recorded.
_SORTED_WITH_ADAPTERS = frozenset({"scheduled", "finished"})


def load_golden(path: Path) -> list[Row]:
    """Read the rows of a golden file, without its first line.

    Raises:
        ScenarioError: The file cannot be read, or is truncated.
    """
    lines = read_text(path).splitlines()
    try:
        rows: list[Row] = [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ScenarioError(f"{path} is not one whole JSON object a line: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise ScenarioError(f"{path} holds a line that is not a JSON object")
    if not rows or rows[0].get("golden") != 1:
        raise ScenarioError(f"{path} does not begin with a golden file's first line")
    if "end" not in rows[-1] and "error" not in rows[-1]:
        raise ScenarioError(f"{path} is cut short: its last line is no end")
    return rows[1:]


def first_difference(
    rows: Sequence[Row], golden: Sequence[Row], *, ignores_order: bool = False
) -> str | None:
    """Step and key of the first difference and both values; None if there is none.

    Args:
        rows: Rows of this run.
        golden: Rows of the recorded run.
        ignores_order: Compare what was scheduled, and so what finished, as sets: with adapters
            vLLM 0.6.2 sorts it by adapter and request id after all decisions.
    """
    for ours, theirs in zip(rows, golden, strict=False):
        step = theirs.get("step", "end")
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            pair = ours.get(key), theirs.get(key)
            if ignores_order and key in _SORTED_WITH_ADAPTERS and all(pair):
                pair = sorted(ours[key]), sorted(theirs[key])
            if key not in _NOT_COMPARED and pair[0] != pair[1]:
                return _describe(step, key, *pair)
    if len(rows) != len(golden):
        return f"{len(rows)} rows here, {len(golden)} there"
    return None


def _describe(step: object, key: str, ours: Any, theirs: Any) -> str:
    return f"step {step}, {key}: {json.dumps(ours)} here, {json.dumps(theirs)} there"

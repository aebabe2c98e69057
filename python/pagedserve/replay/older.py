"""Decision logs of format 3, read as the current one.

There a window and the states of recurrences were separate options with separate moves, and every
request might have an encoder.
"""

from typing import Any


def header(header: dict[str, Any]) -> dict[str, Any]:
    """The first line of a log, with KV groups."""
    scheduler, cache = dict(header["scheduler"]), dict(header["cache"])
    groups: list[dict[str, Any]] = []
    if (window := cache.pop("window_group", None)) is not None:
        groups.append({"kind": "window", **window})
    num_slots = scheduler.pop("num_state_slots", 0)
    num_cpu_slots = scheduler.pop("num_cpu_state_slots", 0)
    if num_slots:
        groups.append(
            {"kind": "state", "num_gpu_blocks": num_slots, "num_cpu_blocks": num_cpu_slots}
        )
    groups.append({"kind": "cross"})
    return header | {"scheduler": scheduler, "cache": cache | {"groups": groups}}


def line(line: dict[str, Any], header: dict[str, Any]) -> dict[str, Any]:
    """A later line of a log that begins with ``header``, as it was read."""
    line = dict(line)
    windows, states = line.pop("window_moves", None), line.pop("state_moves", None)
    nothing = [0, 0, 0]
    moves = []
    if header["cache"].get("window_group") is not None:
        moves.append(windows or nothing)
    if header["scheduler"].get("num_state_slots"):
        moves.append(states or nothing)
    return line | {"group_moves": [*moves, nothing]}

"""What the steps of a decision log did with one request."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pagedserve.replay.log_lines import LogLines


def request_steps(path: Path, request_id: str) -> Iterator[str]:
    """Describe what each step did with a request.

    Args:
        path: A log, or the last file of one in a directory; its first parts may be missing.
        request_id: Request id, or its prefix up to a hyphen: a server appends a unique suffix to
            the response id, and the index of each prompt.

    Yields:
        A line of text for each.

    Raises:
        ScenarioError: The log cannot be read.
    """
    groups: dict[int, str] = {}
    for _, line in LogLines(path, from_first=False):
        for kind, *arguments in line.get("events", ()):
            if kind == "add" and _is_named(arguments[0], request_id):
                groups[arguments[0]["group"]] = arguments[0]["request_id"]
                num_tokens = len(arguments[0]["token_ids"])
                yield f"{arguments[0]['request_id']}: added with {num_tokens} tokens"
            elif kind == "abort" and arguments[0] in groups:
                yield f"{groups[arguments[0]]}: ended from outside"
        for group, deed in _deeds(line):
            if group in groups:
                yield f"{groups[group]}: step {line['step']} at {line['now']:.3f} s: {deed}"


def _is_named(request: dict[str, Any], request_id: str) -> bool:
    name: str = request.get("request_id", "")
    return name == request_id or name.startswith(f"{request_id}-")


def _deeds(line: dict[str, Any]) -> Iterable[tuple[int, str]]:
    for group, num_tokens, is_prefill, num_rows in line.get("scheduled", ()):
        kind = "prefill of" if is_prefill else "decode,"
        yield group, f"{kind} {num_tokens} tokens, {num_rows} rows"
    for group, mode in line.get("preempted", ()):
        yield group, f"preempted by {mode}"
    for group in line.get("swapped_in", ()):
        yield group, "swapped in"
    for group, reason in line.get("ignored", ()):
        yield group, f"refused permanently: {reason}"
    for group, reason in line.get("refused", ()):
        yield group, f"waits: {reason}"

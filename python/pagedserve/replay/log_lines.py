"""Lines of a decision log, from one file or several parts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pagedserve.replay.scenario import ScenarioError, read_text

# Number of a log in its directory, and of a part.
_PART: Final = re.compile(r"decisions-(\d+)-(\d+)\.jsonl")


class LogLines:
    """Iterates over the lines of a log, with their positions; one part is in memory at a time.

    Attributes:
        is_cut: Whether the last line is truncated, as after a crash; it is ignored.

    Raises:
        ScenarioError: Parts are missing, files cannot be read, or a line is not a JSON object.
    """

    def __init__(self, path: Path, *, from_first: bool = True) -> None:
        """Find the parts.

        Args:
            path: A file, which earlier parts belong to.
            from_first: Whether a log whose first parts were removed is refused.
        """
        self.is_cut = False
        self._parts = _parts_until(path)
        if from_first and not has_first_part(path):
            raise ScenarioError(
                f"{self._parts[0]} is the first part there is; those before it were removed, and "
                "only a log from its first part can be run again"
            )

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the position of each line, and its object."""
        for part in self._parts:
            texts = read_text(part).splitlines()
            for number, text in enumerate(texts, start=1):
                try:
                    line = json.loads(text)
                except json.JSONDecodeError as error:
                    if part == self._parts[-1] and number == len(texts):
                        self.is_cut = True
                        return
                    raise ScenarioError(f"{part}, line {number} is not JSON: {error}") from error
                if not isinstance(line, dict):
                    raise ScenarioError(f"{part}, line {number} is not a JSON object")
                yield f"{part}, line {number}", line


def has_first_part(path: Path) -> bool:
    """Whether a log has its first part; ``path`` is its only file, or one of its parts."""
    first = _PART.fullmatch(_parts_until(path)[0].name)
    return first is None or int(first[2]) == 1


def last_parts(path: Path) -> list[Path]:
    """Return the file itself, or the last file of each log in a directory, oldest log first.

    Raises:
        ScenarioError: The directory has no log.
    """
    if not path.is_dir():
        return [path]
    last: dict[int, tuple[int, Path]] = {}
    for file in path.iterdir():
        if found := _PART.fullmatch(file.name):
            log, part = int(found[1]), int(found[2])
            last[log] = max(last.get(log, (0, file)), (part, file))
    if not last:
        raise ScenarioError(f"{path} has no decision log: no file decisions-....jsonl")
    return [last[log][1] for log in sorted(last)]


def _parts_until(path: Path) -> list[Path]:
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    parts = []
    for number in range(int(named[2]), 0, -1):
        part = path.with_name(f"decisions-{named[1]}-{number:05}.jsonl")
        if part != path and not part.exists():
            break
        parts.append(part)
    return parts[::-1]

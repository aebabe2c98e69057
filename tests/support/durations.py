"""Seconds that each file of tests takes, by which the longest are run first: ``make durations``."""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

FILE: Final = Path(__file__).parents[1] / "durations.json"
# Files that take less are not listed.
_LEAST_SECONDS: Final = 10.0


def read() -> Mapping[str, float]:
    """The seconds of files that take long, by their path from the root of the repository."""
    found: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Write the seconds that a report of pytest (``--junitxml``) has of each file."""
    (report,) = sys.argv[1:]
    root = FILE.parents[1]
    seconds = defaultdict[str, float](float)
    for case in ET.parse(report).iter("testcase"):  # noqa: S314  # pytest's own
        path = Path(*case.attrib["classname"].split("."))
        while not (root / path).with_suffix(".py").is_file():  # its end is a class
            path = path.parent
        seconds[str(path.with_suffix(".py"))] += float(case.attrib["time"])
    slow = {name: round(took, 1) for name, took in seconds.items() if took >= _LEAST_SECONDS}
    FILE.write_text(json.dumps(slow, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Seconds that tests take: the longest files are run first, and long tests left to `.ci/run`."""

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

FILE: Final = Path(__file__).parents[1] / "durations.json"
# Files and tests that take less are not listed.
_LEAST_SECONDS_OF_A_FILE: Final = 10.0
_LEAST_SECONDS_OF_A_TEST: Final = 0.4


def read() -> Mapping[str, float]:
    """The seconds of files and of tests that take long, by pytest's ids of them."""
    found: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Write the seconds that a report of pytest (``--junitxml``) has of each file and test."""
    (report,) = sys.argv[1:]
    root = FILE.parents[1]
    files = defaultdict[str, float](float)
    tests = dict[str, float]()
    for case in ET.parse(report).iter("testcase"):  # noqa: S314  # pytest's own
        path, inner = Path(*case.attrib["classname"].split(".")), [case.attrib["name"]]
        while not (root / path).with_suffix(".py").is_file():  # its end is a class
            path, inner = path.parent, [path.name, *inner]
        name, took = str(path.with_suffix(".py")), float(case.attrib["time"])
        files[name] += took
        tests["::".join((name, *inner))] = took
    slow = {
        name: round(took, 1)
        for seconds, least in ((files, _LEAST_SECONDS_OF_A_FILE), (tests, _LEAST_SECONDS_OF_A_TEST))
        for name, took in seconds.items()
        if took >= least
    }
    FILE.write_text(json.dumps(slow, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

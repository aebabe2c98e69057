"""``python -m pagedserve.replay``: replay a scenario or a decision log."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pagedserve.errors import PagedServeError, RequestError
from pagedserve.replay.compare import first_difference, load_golden
from pagedserve.replay.driver import Row, ScenarioDriver
from pagedserve.replay.log import replay_log
from pagedserve.replay.log_lines import has_first_part, last_parts
from pagedserve.replay.request_steps import request_steps
from pagedserve.replay.scenario import load_scenario

_DESCRIPTION = (
    "Replay a decision log, or a scenario, and show where the decisions differ; or show what the "
    "steps of a log did with a request."
)

_DIFFERS = 1
_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if all decisions are equal (or nothing was to be compared), 1 at the first difference, 2
        for input that cannot be read.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.log and (options.out or options.golden):
        parser.error("--out and --golden belong to --scenario; a log says itself what was decided")
    if options.scenario and options.request:
        parser.error("--request belongs to a log")
    try:
        difference = _scenario(options) if options.scenario else _logs(options)
    except (PagedServeError, OSError) as error:
        print(f"pagedserve.replay: error: {error}", file=sys.stderr)
        return _BAD_INPUT
    if difference:
        print(f"differs: {difference}")
        return _DIFFERS
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pagedserve.replay", description=_DESCRIPTION)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "log", nargs="?", type=Path, help="a log that Scheduler(log=...) wrote, or its directory"
    )
    source.add_argument("--scenario", type=Path, help="a scenario file, .json or .json.gz")
    parser.add_argument("--out", type=Path, help="write the scenario's rows here, one a line")
    parser.add_argument("--golden", type=Path, help="compare the rows with this file")
    parser.add_argument(
        "--request", metavar="ID", help="only show what each step of a log did with this request"
    )
    return parser


def _scenario(options: argparse.Namespace) -> str | None:
    scenario = load_scenario(options.scenario)
    golden = load_golden(options.golden) if options.golden else None
    driver = ScenarioDriver(scenario)
    rows = list(driver.rows())
    if options.out:
        _write(options.out, scenario.name, rows)
    end = rows[-1]["end"]
    print(
        f"{scenario.name}: {end['steps']} steps, {end['finished']} finished, "
        f"{end['ignored']} ignored, {end['recompute']} recomputed, {end['swap_out']} swapped out, "
        f"end={end['end']}"
    )
    if golden is None:
        return None
    return first_difference(rows, golden, ignores_order=scenario.config.max_loras is not None)


def _write(path: Path, name: str, rows: Iterable[Row]) -> None:
    header: Row = {"golden": 1, "scenario": name}
    with path.open("w", encoding="utf-8") as file:
        for row in (header, *rows):
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def _logs(options: argparse.Namespace) -> str | None:
    """Replay each log of a directory, or a single one; return the first difference."""
    paths, differences = last_parts(options.log), []
    if options.request:
        _show_request(paths, options.request)
        return None
    for path in paths:
        if path != paths[-1] and not has_first_part(path):
            print(f"{path}: not run again, its first parts were removed")
        else:
            differences.append(_log(path))
    return next(filter(None, differences), None)


def _show_request(paths: Sequence[Path], request_id: str) -> None:
    lines = [line for path in paths for line in request_steps(path, request_id)]
    if not lines:
        raise RequestError(f"no step of {paths[0]} has the request {request_id!r}")
    print("\n".join(lines))


def _log(path: Path) -> str | None:
    replay = replay_log(path)
    note = ", all but the last line, which is cut short" if replay.is_cut else ""
    steps = "step" if replay.num_steps == 1 else "steps"
    print(f"{path}: {replay.num_steps} {steps} run again{note}")
    return replay.difference


if __name__ == "__main__":
    sys.exit(main())

"""A short stress of hostile requests; `make hostile` is a long one."""

from pathlib import Path

from tests.hostile.kinds import KINDS
from tests.hostile.storm import draw, run_storm

SEED = 0


def test_hostile_requests_end_alone(tmp_path: Path) -> None:
    first = {draw(KINDS, SEED, number)[0].name: number for number in reversed(range(1000))}
    assert len(first) == len(KINDS)
    numbers = sorted({*range(100), *first.values()})
    report = run_storm(
        tmp_path,
        KINDS,
        numbers=numbers,
        seed=SEED,
        num_clients=16,
        quiet_seconds=0,  # each victim ends one stream
        settle_seconds=0,  # no memory is compared
        niceness=0,  # beside busy processes the victims would run for minutes
    )
    assert report.faults == []
    tallies = report.storm.tallies.values()
    assert sum(tally.outcomes.total() for tally in tallies) == len(numbers)
    assert report.beside.num_probes > 0

"""A short stress of hostile requests; `make hostile` is a long one."""

from pathlib import Path

from tests.hostile.kinds import KINDS
from tests.hostile.storm import run_storm

NUM_REQUESTS = 200


def test_hostile_requests_end_alone(tmp_path: Path) -> None:
    report = run_storm(
        tmp_path,
        KINDS,
        numbers=range(NUM_REQUESTS),
        seed=0,
        num_clients=16,
        quiet_seconds=0,  # each victim ends one stream
        settle_seconds=0,  # no memory is compared
    )
    assert report.faults == []
    tallies = report.storm.tallies.values()
    assert sum(tally.outcomes.total() for tally in tallies) == NUM_REQUESTS
    assert report.beside.num_probes > 0

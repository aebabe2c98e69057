"""A replica whose ranks Ray places: one of them is killed, and its streams go on elsewhere."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.deploy.conftest import children, deployed, one_is_killed, read_all
from tests.server.conftest import Process

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("deploy") / "log"
    ranks = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"]
    with deployed(directory, log, *ranks, "--replica-num-cpus", "0.5") as process:
        yield process


def ranks(server: Process) -> list[psutil.Process]:
    return children(server, "RankActor")


def test_they_answer_as_one_engine_does(server: Process, wanted: list[str]) -> None:
    assert len(ranks(server)) == 1
    assert asyncio.run(read_all(server)) == wanted


def test_streams_outlive_a_rank(server: Process, wanted: list[str]) -> None:
    with one_is_killed(server):
        assert asyncio.run(read_all(server, kill=ranks(server))) == wanted
    assert asyncio.run(read_all(server)) == wanted

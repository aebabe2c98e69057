"""When a server's garbage is collected."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from pagedserve.collector import IdleCollector


class Knot:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[IdleCollector]:
    before = gc.get_threshold()
    collector = IdleCollector()
    collector.start()
    yield collector
    collector.stop()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def old_knot() -> "weakref.ref[Knot]":
    """Garbage of the oldest generation, after which a full collection is due."""
    knot = Knot()
    ref = weakref.ref(knot)
    enough = gc.get_count()[2] + 20
    while gc.get_count()[2] < enough:  # a call does nothing while another thread collects
        gc.collect(1)
    return ref


def test_a_full_collection_waits_until_nothing_runs(collector: IdleCollector) -> None:
    knot = old_knot()
    kept = [[number] for number in range(200_000)]  # after so many Python itself would collect
    collector.look(is_idle=False)
    assert knot() is not None
    collector.look(is_idle=True)
    assert knot() is None
    assert len(kept) == 200_000


def test_a_server_that_is_never_idle_collects_once_a_minute(
    collector: IdleCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedserve.collector._MAX_WAIT", 0.0)
    knot = old_knot()
    collector.look(is_idle=False)
    assert knot() is None

"""When a server's garbage is collected.

Each test runs in a process of its own: whatever another test left behind may collect at any time.
"""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

import pagedserve.server.collector
from pagedserve.server.collector import IdleCollector
from tests.support.doc_blocks import ROOT


class Knot:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@contextmanager
def running_collector() -> Iterator[IdleCollector]:
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
    for _ in range(20):
        gc.collect(1)
    return ref


def a_server_that_starts_does_not_collect() -> None:
    collector = IdleCollector()
    knot = old_knot()
    kept = [[number] for number in range(200_000)]  # after so many Python itself would collect
    assert knot() is not None
    collector.start()
    assert knot() is None
    assert len(kept) == 200_000
    collector.stop()


def a_full_collection_waits_until_nothing_runs() -> None:
    with running_collector() as collector:
        knot = old_knot()
        kept = [[number] for number in range(200_000)]  # after so many Python itself would collect
        collector.look(is_idle=False)
        assert knot() is not None
        collector.look(is_idle=True)
        assert knot() is None
        assert len(kept) == 200_000


def a_server_that_is_never_idle_collects_once_a_minute() -> None:
    pagedserve.server.collector._MAX_WAIT = 0.0  # type: ignore[misc]
    with running_collector() as collector:
        knot = old_knot()
        collector.look(is_idle=False)
        assert knot() is None


def a_server_that_is_never_idle_returns_freed_memory() -> None:
    pagedserve.server.collector._MAX_WAIT = 0.0  # type: ignore[misc]
    process, kib = psutil.Process(), 1 << 10
    with running_collector() as collector:
        old_knot()
        pieces = [bytearray(100 * kib) for _ in range(2000)]
        del pieces[::2]
        held = process.memory_info().rss
        collector.look(is_idle=False)
        assert process.memory_info().rss < held - 80_000 * kib
        assert len(pieces) == 1000


def a_server_that_comes_to_rest_collects_what_is_left_once() -> None:
    pagedserve.server.collector._REST = 0.0  # type: ignore[misc]
    with running_collector() as collector:
        knot = Knot()
        ref = weakref.ref(knot)
        del knot
        collector.look(is_idle=True)  # no request was open since it started
        assert ref() is not None
        collector.look(is_idle=False)
        assert ref() is None
        later = Knot()
        ref = weakref.ref(later)
        del later
        collector.look(is_idle=True)
        assert ref() is not None


@pytest.mark.parametrize(
    "check",
    [
        a_server_that_comes_to_rest_collects_what_is_left_once,
        a_server_that_starts_does_not_collect,
        a_full_collection_waits_until_nothing_runs,
        a_server_that_is_never_idle_collects_once_a_minute,
        a_server_that_is_never_idle_returns_freed_memory,
    ],
)
def test_when_garbage_is_collected(check: Callable[[], None]) -> None:
    code = f"from tests.server.test_collector import {check.__name__} as check; check()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

"""The gate for speed on given figures: ratios, limits and rounds.  Nothing is timed here."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHES = Path(__file__).resolve().parents[2] / "benches" / "python"


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHES))
    return importlib.import_module("compare")


def case(compare: ModuleType, kind: str, there: list[float], here: list[float]) -> Any:
    """A case whose checkouts take these times, one a round."""
    return compare.Case(kind, "decode", (iter(there).__next__, iter(here).__next__))


def test_slowdown_is_the_median_of_ratios_within_rounds(compare: ModuleType) -> None:
    # The machine grows three times as slow; the medians of the times would say 1.5.
    drifting = case(compare, "core", [10, 20, 30], [10.2, 30, 30.6])
    compare.measure_in_turn([drifting], 3)
    assert drifting.ratios() == pytest.approx([1.02, 1.5, 1.02])
    assert drifting.slowdown() == pytest.approx(1.02)
    row = drifting.row()
    assert row["spread"] == "1.020 to 1.500"
    assert (row["old us"], row["new us"], row["verdict"]) == (20, 30, "ok")


@pytest.mark.parametrize(("kind", "limit"), [("core", 1.03), ("border", 1.03), ("engine", 1.05)])
def test_limits(compare: ModuleType, kind: str, limit: float) -> None:
    for ratio, is_slower in ((limit - 0.001, False), (limit + 0.001, True), (0.5, False)):
        measured = case(compare, kind, [100.0] * 2, [100.0 * ratio] * 2)
        compare.measure_in_turn([measured], 1)
        assert measured.is_slower() is is_slower


def test_only_cases_beyond_their_limit_get_more_rounds(compare: ModuleType) -> None:
    steady = case(compare, "core", [10, 10, 10], [10, 10, 10])
    unlucky = case(compare, "core", [10] * 6, [11, 11, 10, 10, 10, 10])
    slower = case(compare, "core", [10] * 6, [11] * 6)
    compare.measure_in_turn([steady, unlucky, slower], 3)
    assert [len(found.ratios()) for found in (steady, unlucky, slower)] == [3, 6, 6]
    assert [found.is_slower() for found in (steady, unlucky, slower)] == [False, False, True]


def test_order_alternates_between_rounds(compare: ModuleType) -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return 1.0

    measures = (lambda: measure("there"), lambda: measure("here"))
    compare.measure_in_turn([compare.Case("border", "16 sequences", measures)], 3)
    assert order == ["there", "here", "here", "there", "there", "here"]


def test_an_unknown_kind_is_refused(
    compare: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main(["HEAD", "--only", "core,bordr"])
    assert "'bordr' is none of core, border, engine" in capsys.readouterr().err


def test_core_cases_exist_in_the_benches(compare: ModuleType) -> None:
    for bench, ids in compare.CORE.items():
        source = (BENCHES.parent / f"{bench}.rs").read_text()
        for case_id in ids:
            assert f'benchmark_group("{"/".join(case_id.split("/")[:2])}")' in source

import time

import pytest

from pagedserve.batch_files.progress import Progress


def test_lines_are_printed_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    known, unknown = Progress(90, num_before=10), Progress(None, num_before=0)
    for _ in range(40):  # two a second
        clock += 0.5
        known.advance()
        unknown.advance()
    known.close()
    assert capsys.readouterr().err.splitlines() == [
        "30 of 90 lines, 2.0 lines/s, 00:30 left",
        "20 lines, 2.0 lines/s",
        "50 of 90 lines, 2.0 lines/s, 00:20 left",
        "40 lines, 2.0 lines/s",
    ]
    assert known.rate() == "2.0 lines/s"

"""The bench of beam search runs and says what it promises; its figures are not judged here."""

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pagedserve import LLM

BENCHES = Path(__file__).resolve().parents[2] / "benches" / "python"


@pytest.mark.slow
def test_beams_are_compared_and_blocks_counted(
    smollm2: "LLM", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHES))
    beams = importlib.import_module("beams")
    options = ["--num-prompts", "2", "--num-tokens", "4", "--prompt-tokens", "70", "--repeat", "1"]
    parsed = beams.options_from([*options, "--width", "2", "--json"])
    beams.share(smollm2, parsed)
    beams.compare(smollm2, parsed)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    compared = ["run", "run", "median"]
    assert [row["kind"] for row in rows] == ["sharing"] * 3 + 2 * compared
    assert all(row["blocks"] < row["blocks_of_independent"] for row in rows[:3])
    short, long = rows[5], rows[8]
    assert short["prompt_tokens"] != long["prompt_tokens"] == 70
    assert short["equal_sequences"] == long["equal_sequences"] == 2
    assert short["ratio"] > 0

"""``pagedserve decide calibrate``, and the files of examples that it reads."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pagedserve import LLM, Calibration, RequestError
from pagedserve.cli.main import main
from pagedserve.decisions.examples import read_examples

QUESTIONS: dict[str, Any] = {
    "team": {"type": "choice", "criteria": {"refunds": None, "sales": None}},
    "late": {"type": "noul", "instructions": "Is it late?"},
    "mood": {"type": "score", "criteria": ["low", "mid", "high"]},
}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_temperatures_are_fitted_to_a_file_of_examples(
    stand_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {
            "state": {"number": number},
            "questions": QUESTIONS,
            "answers": {"team": ("refunds", "sales")[number % 2], "late": number % 2 == 0},
        }
        for number in range(6)
    ]
    examples = write(tmp_path / "examples.jsonl", *lines)
    output = tmp_path / "calibration.json"
    tags = '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'
    sizes = ("--dtype", "float32", "--num-gpu-blocks", "128")
    options = ("--model", str(stand_in), *sizes, "--reasoning-config", tags)
    files = ("--examples", str(examples), "--output", str(output))
    assert main(["decide", "calibrate", *options, *files]) == 0
    assert "12 answers: log loss" in capsys.readouterr().out
    calibration = Calibration.load(output)
    with LLM(str(stand_in), dtype="float32", num_gpu_blocks=128, use_tqdm_on_load=False) as llm:
        reads = [
            read
            for example in read_examples(examples)
            for read in example.reads(llm.decide(example.state, example.questions))
        ]
    assert calibration == Calibration.fitted(reads)
    assert calibration.temperatures["score"] == 1
    assert calibration.log_loss(reads) < Calibration().log_loss(reads)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("none/calibration.json", "is no directory; create it first"),
        ("folder", "is a directory; give a file"),
        ("link", "is the input file; give another"),
        ("kept", "cannot write"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
    message: str,
) -> None:
    line = {"state": 1, "questions": QUESTIONS, "answers": {"late": True}}
    examples = write(tmp_path / "examples", line)
    before = examples.read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(examples)
    (tmp_path / "kept").touch()
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "kept")  # root may write all
    files = ("--examples", str(examples), "--output", str(tmp_path / output))
    assert main(["decide", "calibrate", "--model", "./not-loaded", *files]) == 2
    assert message in capsys.readouterr().err
    assert examples.read_bytes() == before


def test_labels_are_the_indices_of_the_options(tmp_path: Path) -> None:
    answers = {"team": "sales", "late": False, "mood": 2}
    line = {"state": "x", "questions": QUESTIONS, "answers": answers, "instructions": "Sort."}
    (example,) = read_examples(write(tmp_path / "examples", line))
    assert example.labels == {"team": 1, "late": 1, "mood": 2}
    assert example.instructions == "Sort."


def test_a_line_may_have_a_byte_order_mark_and_other_separators(tmp_path: Path) -> None:
    line = {"state": "a\u2028b\u2029c\x85d", "questions": QUESTIONS, "answers": {"late": True}}
    text = json.dumps(line, ensure_ascii=False)
    (tmp_path / "examples").write_bytes(f"\ufeff{text}\r\n{text}\n".encode())
    examples = read_examples(tmp_path / "examples")
    assert [example.state for example in examples] == [line["state"]] * 2


def test_a_line_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "examples").write_text("[" * 100_000)
    with pytest.raises(RequestError, match="line 1 is not JSON: maximum recursion depth"):
        read_examples(tmp_path / "examples")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"questions": QUESTIONS, "answers": {"late": True}}, "line 1 must be an object with"),
        ({"state": 1, "questions": QUESTIONS}, "line 1 has no answers"),
        ({"state": 1, "questions": QUESTIONS, "answers": {"x": 1}}, "to x; its questions are team"),
        ({"state": 1, "questions": QUESTIONS, "answers": {"late": 1}}, "accepted are True, False"),
        ({"state": 1, "questions": QUESTIONS, "answers": {"mood": True}}, "accepted are 0, 1, 2"),
        ({"state": 1, "questions": {}, "answers": {"q": 1}}, "line 1: questions must be"),
    ],
)
def test_other_examples_are_refused_by_line(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_examples(write(tmp_path / "examples", line))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(RequestError, match="has no example"):
        read_examples(tmp_path / "empty")

"""Temperatures fitted to known answers."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from pagedserve import Calibration, ConfigError, RequestError
from pagedserve.decisions.calibration import LabelledRead


def reads_of(temperature: float, num_reads: int = 300) -> list[LabelledRead]:
    """Reads whose answers are drawn from the softmax of their logits at a temperature."""
    rng = random.Random(5)
    reads = []
    for _ in range(num_reads):
        logits = np.array([rng.gauss(0, 3) for _ in range(4)])
        weights = np.exp(logits / temperature)
        answer = rng.choices(range(4), weights.tolist())[0]
        logprobs = logits - math.log(np.exp(logits).sum())
        reads.append(LabelledRead("choice", logprobs.tolist(), answer))
    return reads


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
def test_the_temperature_that_made_the_answers_is_found(temperature: float) -> None:
    reads = reads_of(temperature)
    calibration = Calibration.fitted(reads)
    assert calibration.temperatures["choice"] == pytest.approx(temperature, rel=0.2)
    assert calibration.temperatures["noul"] == calibration.temperatures["score"] == 1
    # No temperature of a fine grid has less loss.
    least = calibration.log_loss(reads)
    for other in np.geomspace(0.05, 20, 200):
        grid = Calibration({"choice": float(other), "noul": 1.0, "score": 1.0})
        assert least <= grid.log_loss(reads) + 1e-12


def test_answers_that_are_always_right_or_wrong_end_at_a_limit() -> None:
    right = [LabelledRead("noul", [-0.1, -2.4], 0)] * 3
    wrong = [LabelledRead("noul", [-0.1, -2.4], 1)] * 3
    assert Calibration.fitted(right).temperatures["noul"] < 0.2
    assert Calibration.fitted(wrong).temperatures["noul"] == pytest.approx(20, rel=1e-6)


def test_a_file_keeps_it(tmp_path: Path) -> None:
    calibration = Calibration({"choice": 1.25, "noul": 0.1, "score": 7})
    calibration.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == calibration


def test_types_without_a_temperature_have_one() -> None:
    assert Calibration({"choice": 2}).temperatures == {"choice": 2.0, "noul": 1.0, "score": 1.0}
    for given in ({"noul": 0.0}, {"noul": "1"}, {"other": 1.0}, 2.0):
        with pytest.raises(RequestError):
            Calibration(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read"),
        ("[]", "must have temperatures of choice, noul, score"),
        ('{"temperatures": {"choice": 1}}', "must have temperatures of choice, noul, score"),
        (
            '{"temperatures": {"choice": 0, "noul": 1, "score": 1}}',
            "of choice is 0; it must be",
        ),
        ('{"temperatures": {"choice": true, "noul": 1, "score": 1}}', "of choice is True"),
        ('{"temperatures": {"choice": NaN, "noul": 1, "score": 1}}', "of choice is nan"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        Calibration.load(tmp_path / "calibration.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        Calibration.load(tmp_path / "absent.json")

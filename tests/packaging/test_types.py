"""What type checkers report of programs: nothing of right ones and of the docs, every mistake."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import pagedserve
import pagedserve.scheduler
from tests.packaging.typed import user
from tests.support.doc_blocks import python_examples

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "packaging" / "typed"


# A user's settings; types of these packages take a minute to read.
SETTINGS = """
[mypy]
strict = True
follow_imports = silent
[mypy-anthropic.*,openai.*,torch.*,transformers.*]
follow_imports = skip
"""


def test_mypy_accepts_right_programs_and_refuses_each_mistake(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    programs = [PROGRAMS / "user.py", PROGRAMS / "mistakes.py"]
    for example in python_examples():
        name = re.sub(r"\W", "_", example.page)
        programs.append(tmp_path / f"{name}_{example.line}.py")
        programs[-1].write_text(example.code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", ROOT / ".mypy_cache" / "user", *programs],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_program_uses_every_public_name() -> None:
    public = {*dir(pagedserve), *pagedserve.scheduler.__all__}
    assert not public - vars(user).keys()


def test_the_program_without_a_model_runs() -> None:
    prompts = [np.array([1, 2, 3], np.int32), np.array([7], np.int32)]
    assert user.scheduled(prompts, num_steps=3) == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    assert user.managed() == [0, 1, 8, 0, 0, 0]
    assert user.drafted() == [7, 8, 9]
    assert user.windows() > 0
    assert "step" in user.out_of_order()
    assert user.version() == pagedserve.__version__

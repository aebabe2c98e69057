import ast
import subprocess
import sys

import pytest

import pagedserve
import pagedserve.scheduler
from tests.support.exports import HOME, STUB


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_importing_loads_no_extra_and_prints_nothing() -> None:
    out = run(
        "import sys, pagedserve; pagedserve.SamplingParams(); pagedserve.Scheduler\n"
        "print([name for name in ('torch', 'transformers', 'tqdm') if name in sys.modules])"
    )
    assert out == "[]\n"


def test_every_public_name_is_there() -> None:
    for name in pagedserve.__all__:
        assert getattr(pagedserve, name) is not None


def test_dir_lists_no_name_of_the_scheduler_alone() -> None:
    assert set(pagedserve.__all__) - set(dir(pagedserve)) <= set(pagedserve.scheduler.__all__)
    assert set(dir(pagedserve)) < set(pagedserve.__all__)
    assert {"LLM", "EngineClient", "ExecutorDeadError", "__version__"} <= set(dir(pagedserve))
    assert "Scheduler" not in dir(pagedserve)


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse(STUB.read_text())
    imported = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == HOME, "make stubs"
    (names,) = (node.value for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(ast.literal_eval(names)) == sorted(pagedserve.__all__), "make stubs"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = pagedserve.LMM  # type: ignore[attr-defined]


@pytest.mark.parametrize("missing", ["torch", "transformers", "tqdm"])
def test_a_missing_extra_names_the_command(missing: str) -> None:
    # None in sys.modules makes an import fail as if the package were not there.
    out = run(
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import pagedserve\n"
        "try: pagedserve.LLM\n"
        "except ImportError as error: print(error)"
    )
    assert "pagedserve.LLM needs" in out
    assert missing in out
    assert "pip install 'accelerate>=" in out

import subprocess
import sys

import pytest

import pagedserve


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
    assert set(dir(pagedserve)) == set(pagedserve.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = pagedserve.LMM


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

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_from_root(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code as a user at a prompt in the repository root would: the folder is on the path."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_transformers_imports_where_the_folder_is_on_the_path() -> None:
    done = run_from_root("import transformers; transformers.PreTrainedModel")
    assert done.returncode == 0, done.stderr


def test_a_module_cannot_be_loaded_a_second_time_under_the_folder_s_name() -> None:
    done = run_from_root("import kernels.reference")
    assert "import this module as pagedserve.kernels.reference" in done.stderr

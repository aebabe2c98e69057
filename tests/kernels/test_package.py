import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_from_root(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code as a user at a prompt in the repository root would: the folder is on the path."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_transformers_imports_where_the_folder_is_on_the_path_and_no_module_does_twice() -> None:
    done = run_from_root(
        "import transformers; transformers.PreTrainedModel; print('imported', flush=True)\n"
        "import kernels.reference"
    )
    assert done.stdout == "imported\n", done.stderr
    assert "import this module as pagedserve.kernels.reference" in done.stderr

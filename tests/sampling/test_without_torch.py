"""The sampler where neither torch nor transformers is installed."""

import subprocess
import sys

from tests.support.doc_blocks import ROOT

# A finder that comes before all others.
WITHOUT = """
import runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Absent())
runpy.run_module("tests.support.torchless", run_name="__main__")
"""


def test_every_parameter_is_sampled_as_plain_numpy_does() -> None:
    command = [sys.executable, "-c", WITHOUT]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr

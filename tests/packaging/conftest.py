"""The built artifacts, and an environment that holds only the wheel and numpy."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def execute(*command: str | Path, cwd: Path) -> str:
    """Run a command with this environment's tools first on the path; its output, or a failure."""
    environment = os.environ | {
        "CARGO_TARGET_DIR": str(ROOT / "target"),  # dependencies are compiled there already
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    return execute


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it, as a release makes them.

    Cargo takes crates that the working tree's build compiled: files of an sdist have times years
    ago, so none counts as changed.  That they are the working tree's is compared.
    """
    out = tmp_path_factory.mktemp("dist")
    execute(sys.executable, "-m", "build", "--no-isolation", "-o", out, ROOT, cwd=ROOT)
    return out


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    (path,) = dist.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    """What people install; nothing of the working tree but through the sdist."""
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds numpy and the wheel, nothing else.

    numpy is linked in from here and pip may not look anywhere for more: the installation fails
    if the wheel asks for anything else.
    """
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    numpy = importlib.metadata.distribution("numpy")
    for top in {path.parts[0] for path in numpy.files or ()} - {".."}:
        (site_packages / top).symlink_to(Path(str(numpy.locate_file(top))))
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--isolated", "--python", python]
    execute(*pip, "install", "--no-index", wheel, cwd=folder)
    return python

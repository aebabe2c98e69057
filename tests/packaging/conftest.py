"""The built artifacts, and an environment that holds only the wheel and numpy."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
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


def build(source: Path, out: Path, kind: str) -> Path:
    """Build a wheel or an sdist the way pip does, with the build tools installed here."""
    execute(
        sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "-o", out, source, cwd=source
    )
    (artifact,) = out.iterdir()
    return artifact


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    return execute


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="session")
def wheel_from_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    for path in source.rglob("*.rs"):
        path.touch()  # newer than what cargo has built of the same package: it must build these
    return build(source, tmp_path_factory.mktemp("wheel_from_sdist"), "wheel")


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

"""What people install: the wheel and the sdist, not the working tree."""

import re
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

Run = Callable[..., str]

IMPORT_SECONDS = 0.3


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata_of(wheel: Path, name: str) -> list[tuple[str, str]]:
    (path,) = (path for path in contents(wheel) if path.endswith(f".dist-info/{name}"))
    return list(Parser().parsestr(contents(wheel)[path].decode()).items())


def kernels_of(files: dict[str, bytes], folder: str) -> dict[str, bytes]:
    return {
        name.removeprefix(folder): data for name, data in files.items() if name.startswith(folder)
    }


def kernel_sources(root: Path) -> dict[str, bytes]:
    folder = root / "kernels"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}


def test_wheel_is_abi3_for_python_3_11(wheel: Path) -> None:
    tags = [value for key, value in metadata_of(wheel, "WHEEL") if key == "Tag"]
    assert tags
    assert all(tag.startswith("cp311-abi3-") for tag in tags), tags
    assert "pagedserve/_core.abi3.so" in contents(wheel)
    assert {"pagedserve/py.typed", "pagedserve/_core.pyi"} <= contents(wheel).keys()


def test_wheel_requires_numpy_alone(wheel: Path) -> None:
    required = [
        value
        for key, value in metadata_of(wheel, "METADATA")
        if key == "Requires-Dist" and "extra ==" not in value
    ]
    assert [re.split(r"[^\w-]", requirement)[0] for requirement in required] == ["numpy"]


def test_wheel_holds_the_kernels(wheel: Path, root: Path) -> None:
    sources = kernel_sources(root)
    assert "reference.py" in sources
    assert kernels_of(contents(wheel), "pagedserve/kernels/") == sources


def test_sdist_holds_the_kernels(sdist: Path, root: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {
            member.name.split("/", 1)[1]: extracted.read()
            for member in archive.getmembers()
            if (extracted := archive.extractfile(member)) is not None
        }
    assert kernels_of(files, "python/pagedserve/kernels/") == kernel_sources(root)


def test_sdist_builds_the_same_wheel(wheel: Path, wheel_from_sdist: Path) -> None:
    assert wheel_from_sdist.name == wheel.name
    direct, through_sdist = contents(wheel), contents(wheel_from_sdist)
    assert sorted(through_sdist) == sorted(direct)
    # The module and the files that describe the build hold paths of the build.
    differing = {name for name in direct if direct[name] != through_sdist[name]}
    assert not {name for name in differing if name.endswith((".py", ".pyi", "METADATA"))}


def test_import_is_fast_with_numpy_alone(bare_python: Path, run: Run, tmp_path: Path) -> None:
    code = "import time; t = time.perf_counter(); import pagedserve; print(time.perf_counter() - t)"
    seconds = [float(run(bare_python, "-I", "-c", code, cwd=tmp_path)) for _ in range(7)]
    assert min(seconds) < IMPORT_SECONDS, seconds


def test_import_loads_no_heavy_package(run: Run, tmp_path: Path) -> None:
    # In this environment, where they are installed.
    code = "import sys, pagedserve; print(*sys.modules)"
    loaded = run(sys.executable, "-I", "-c", code, cwd=tmp_path).split()
    assert "pagedserve" in loaded
    assert not {"torch", "transformers", "triton", "tqdm"} & set(loaded)


def test_versions_agree(bare_python: Path, wheel: Path, run: Run, tmp_path: Path) -> None:
    code = "import pagedserve, pagedserve._core as c; print(pagedserve.__version__, c.__version__)"
    (version,) = (value for key, value in metadata_of(wheel, "METADATA") if key == "Version")
    assert run(bare_python, "-I", "-c", code, cwd=tmp_path).split() == [version, version]


def test_missing_extra_is_named(bare_python: Path, run: Run, tmp_path: Path) -> None:
    code = (
        "import pagedserve\n"
        "try:\n    pagedserve.LLM(model='smollm2')\n"
        "except ImportError as error:\n    print(error)"
    )
    assert "pagedserve[engine]" in run(bare_python, "-I", "-c", code, cwd=tmp_path)


def test_own_engine_loop_runs_with_numpy_alone(
    bare_python: Path, root: Path, run: Run, tmp_path: Path
) -> None:
    example = root / "examples" / "own_engine_loop.py"
    assert len(example.read_text().splitlines()) < 80
    assert len(run(bare_python, "-I", example, cwd=tmp_path).splitlines()) > 5

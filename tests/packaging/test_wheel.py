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


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata_of(wheel: Path, name: str) -> list[tuple[str, str]]:
    (path,) = (path for path in contents(wheel) if path.endswith(f".dist-info/{name}"))
    return list(Parser().parsestr(contents(wheel)[path].decode()).items())


def below(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {
        name.removeprefix(folder): data for name, data in files.items() if name.startswith(folder)
    }


def sources(root: Path) -> dict[str, bytes]:
    """The package's own files in the working tree, the linked kernels among them."""
    found = {}
    for folder, prefix in ((root / "python" / "pagedserve", ""), (root / "kernels", "kernels/")):
        for path in folder.rglob("*"):
            if path.suffix in {".html", ".py", ".pyi", ".txt", ".typed"}:
                found[prefix + path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def test_wheel_is_abi3_for_python_3_11(wheel: Path) -> None:
    tags = [value for key, value in metadata_of(wheel, "WHEEL") if key == "Tag"]
    assert tags
    assert all(tag.startswith("cp311-abi3-") for tag in tags), tags
    assert "pagedserve/_core.abi3.so" in contents(wheel)
    typed = {"py.typed", "__init__.pyi", "_core/__init__.pyi", "_core/cpu.pyi"}
    assert {f"pagedserve/{name}" for name in typed} <= contents(wheel).keys()


def test_wheel_requires_numpy_alone(wheel: Path) -> None:
    required = [
        value
        for key, value in metadata_of(wheel, "METADATA")
        if key == "Requires-Dist" and "extra ==" not in value
    ]
    assert [re.split(r"[^\w-]", requirement)[0] for requirement in required] == ["numpy"]


def test_wheel_holds_the_package_and_the_built_module_alone(wheel: Path, root: Path) -> None:
    package = below("pagedserve/", contents(wheel))
    assert package.pop("_core.abi3.so")
    expected = sources(root)
    assert {"__init__.py", "kernels/reference.py", "py.typed"} <= expected.keys()
    assert package == expected


def test_sdist_holds_the_same_package_and_what_builds_it(sdist: Path, root: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {
            member.name.split("/", 1)[1]: extracted.read()
            for member in archive.getmembers()
            if (extracted := archive.extractfile(member)) is not None
        }
    assert below("python/pagedserve/", files) == sources(root)
    rust = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.glob("rust/*/src/**/*.rs")
    }
    assert {"CHANGELOG.md", "LICENSE", "docs/stability.md", "python/README.md"} <= files.keys()
    built = {name for name in files if re.fullmatch(r"rust/\w+/src/.*\.rs", name)}
    assert built == rust.keys()
    assert all(files[name] == data for name, data in rust.items())


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
    said = run(bare_python, "-I", "-c", code, cwd=tmp_path)
    assert "pagedserve.LLMEngine needs tokenizers, which is not installed: pip install '" in said
    assert "'tokenizers>=" in said


def test_own_engine_loop_runs_with_numpy_alone(
    bare_python: Path, root: Path, run: Run, tmp_path: Path
) -> None:
    example = root / "examples" / "own_engine_loop.py"
    assert len(example.read_text().splitlines()) < 80
    assert len(run(bare_python, "-I", example, cwd=tmp_path).splitlines()) > 5


def test_kernels_are_near_numpy_on_every_instruction_set(
    bare_python: Path, root: Path, run: Run, tmp_path: Path
) -> None:
    lines = run(bare_python, "-I", root / "tools" / "check_kernels.py", cwd=tmp_path).splitlines()
    assert lines[0].startswith("portable: "), lines
    assert all(line.endswith("results, all near those of numpy") for line in lines), lines

"""Checkouts of pagedserve that are compared: this working tree, and another commit built beside it.

A commit is unpacked below target/compare and stays there until `cargo clean`, so that comparing
with it again builds nothing.  Both trees are built by the same commands, each into a target
directory of its own: in one directory cargo takes crates of the other tree for fresh, since names,
versions and places in the workspace are equal.  Neither is installed: a process uses one by having
its package first on PYTHONPATH.
"""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE / "target")).resolve()
# An extension module leaves Python's symbols to the interpreter that loads it.
PYO3 = {"PYO3_BUILD_EXTENSION_MODULE": "1", "PYO3_PYTHON": sys.executable}


@dataclass(frozen=True, slots=True)
class Checkout:
    """A built tree: `benches` maps names of criterion benches to their executables."""

    root: Path
    benches: dict[str, Path]

    @classmethod
    def working_tree(cls) -> Self:
        """Build the tree that this file belongs to, uncommitted changes included."""
        return cls._built(HERE)

    @classmethod
    def of_commit(cls, name: str) -> Self:
        """Unpack the commit of this name, unless an earlier run has, and build it."""
        commit = _git("rev-parse", "--verify", f"{name}^{{commit}}").decode().strip()
        root = TARGET / "compare" / commit
        if not root.is_dir():
            unfinished = root.with_suffix(".part")
            with tarfile.open(fileobj=BytesIO(_git("archive", commit))) as archive:
                archive.extractall(unfinished, filter="data")
            unfinished.rename(root)
        return cls._built(root)

    @classmethod
    def _built(cls, root: Path) -> Self:
        print(f"building {root}", file=sys.stderr, flush=True)
        command = ("build", "--release", "--package", "pagedserve-py")
        (library,) = (
            Path(path)
            for artifact in _artifacts(command, root)
            if artifact["target"]["kind"] == ["cdylib"]
            for path in artifact["filenames"]
        )
        extension = root / "python" / "pagedserve" / "_core.abi3.so"
        fresh = extension.with_suffix(".new")
        fresh.write_bytes(library.read_bytes())
        fresh.replace(extension)  # never written in place: a running process may have it mapped
        command = ("bench", "--no-run", "--package", "pagedserve-core")
        benches = {
            artifact["target"]["name"]: Path(artifact["executable"])
            for artifact in _artifacts(command, root)
            if artifact["target"]["kind"] == ["bench"]
        }
        return cls(root, benches)

    def environment(self) -> dict[str, str]:
        """Environment variables of a process that imports this checkout's package."""
        # A thread that spins would take a core from the other checkout's process.
        ours = {"PYTHONPATH": str(self.root / "python"), "OMP_WAIT_POLICY": "passive"}
        return os.environ | ours


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=HERE, stdout=subprocess.PIPE, check=True).stdout


def _artifacts(command: tuple[str, ...], root: Path) -> Iterator[dict[str, Any]]:
    done = subprocess.run(
        ["cargo", *command, "--locked", "--message-format", "json-render-diagnostics"],
        cwd=root,
        env=os.environ
        | PYO3
        | {"CARGO_TARGET_DIR": str(TARGET if root == HERE else root / "target")},
        stdout=subprocess.PIPE,
        check=True,
    )
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact":
            yield message

"""Prints what the torch backend needs beside torch and accelerate, installed without dependencies.

torch requires triton, the CUDA bindings and cuSOLVER as well, which its CPU path does not load:
1.3 GB that a machine without a GPU need not fetch.
"""

from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from tomllib import loads
from typing import Final

from packaging.requirements import Requirement

_UNUSED: Final = {"triton", "cuda-bindings"}
_UNUSED_LIBRARIES: Final = {"cusolver", "nvtx"}
_WITHOUT_DEPENDENCIES: Final = {"torch", "accelerate"}


def main() -> None:
    """Print the requirements, one a line."""
    project = loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    for name in _WITHOUT_DEPENDENCIES:
        lines += requires(name) or []
    for needed in _needed(lines):
        print(needed)


def _needed(lines: list[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, lines):
        is_asked = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_asked and requirement.name not in _UNUSED | _WITHOUT_DEPENDENCIES:
            requirement.extras -= _UNUSED_LIBRARIES
            yield requirement


if __name__ == "__main__":
    main()

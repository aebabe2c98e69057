"""The examples of the README and the pages under docs: blocks of Python and shell commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]

_PYTHON: Final = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FENCED: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_INDENTED: Final = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)


class Example(NamedTuple):
    """A block of Python."""

    page: str
    line: int
    code: str


class Command(NamedTuple):
    """A command of a shell, as its arguments."""

    page: str
    arguments: list[str]


def python_examples() -> list[Example]:
    """All blocks that are marked as Python."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _PYTHON.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Example(page.relative_to(ROOT).as_posix(), line, match[1]))
    return found


def commands(program: str) -> list[Command]:
    """All commands of a program in indented blocks."""
    return [
        Command(page.relative_to(ROOT).as_posix(), arguments)
        for page in PAGES
        for block in _INDENTED.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))
        for arguments in _commands_of(block)
        if arguments[0] == program
    ]


def _commands_of(block: str) -> Iterator[list[str]]:
    """The commands of a block, each of which may have several lines."""
    text = ""
    for line in block.splitlines():
        text += line.strip()
        if text.endswith("\\"):
            text = text[:-1]
            continue
        text += "\n"
        try:
            arguments = shlex.split(text, comments=True)
        except ValueError:  # a quotation that ends in a later line
            continue
        if arguments:
            yield arguments
        text = ""

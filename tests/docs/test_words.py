"""No word of the project's former dialect is left where users read.

Each element of ``ROOMS`` is a place that is read: a name, and its texts by where they stand.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeAlias

import pytest

ROOT: Final = Path(__file__).parents[2]

Texts: TypeAlias = Iterator[tuple[str, str]]

# What was said, as a regular expression of words, and the field's word for it.
DIALECT: Final = {
    r"guess(es|ed|ing)?": "draft tokens, proposer",
    r"(no|every|any|some)body|anyone|someone|everyone|whoever|who|whom": "name the thing that acts",
    r"likeliest": "most likely",
    r"meetings? of": "barriers",
    r"mail": "command queue, command",
    r"paces?": "stream interval, speed",
    r"behind": "after, following",
    r"go(es)? on": "continues, resumes",
    r"asked|asks|wanted|wants?": "requested, required, needed",
    r"told|tells?|said|says that|is said": "reported, logged, returned, documented",
    r"given up|gives? up|thrown away": "dropped, evicted, discarded",
    r"given out|gives? out|hands? out": "returned to the caller, assigned",
    r"for ever": "indefinitely",
    r"(is|are) (not )?there|not there yet": "supported, exists, installed",
    r"not here( yet)?|is here": "supported",
    r"pieces?": "modules, shards, chunks, segments",
    r"room": "memory, capacity, free blocks",
    r"shares? out|shared out": "distribute, split",
    r"(bring|brought)s? back|comes? back": "restore, swap in, return",
    r"judges?|judged|trials?": "validate, check, compare",
    r"of (its|their|our|your) own": "separate, dedicated",
    r"as printed|as (it stands|they stand)": "unchanged",
    r"hears?|heard": "accepts audio",
    r"(writes?|written) down": "transcribes",
    r"thoughts?": "reasoning",
    r"a line that says": "a log line with",
    r"beginnings?": "prefixes",
    r"texts that": "completions, sequences, prompts, strings",
    r"so many": "that many",
    r"obeys?|obeyed": "follows, applies",
    r"(is|are) let go": "is disconnected",
    r"without a word": "silently",
    r"by itself": "separately",
}

_ANY_OF_IT: Final = re.compile(rf"\b(?:{'|'.join(DIALECT)})\b")

# A phrase in which such a word means what it means everywhere, and why.
ALLOWED: Final[dict[str, str]] = {
    "Here is my thought process:": "Granite's tag",
    "water room mother": "words of random prompts",
}

# Of a table that is made, the words are those of another room.
_MADE: Final = re.compile(r"<!-- (?:made by|sweep).*?<!-- end of [a-z ]+-->", re.DOTALL)
_CODE: Final = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)


def pages() -> Texts:
    """The pages at the top and under docs, without code, links and made tables."""
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]:
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


# Folders with modules of Python; python/pagedserve/kernels is a link.
PACKAGES: Final = sorted(
    {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("python/pagedserve", "kernels")
        for path in (ROOT / folder).rglob("*.py")
    }
)

# A comment or a string, which may hold what begins the other.
_PYTHON: Final = re.compile(
    r"""#[^\n]*|('{3}|"{3})(?:\\.|(?!\1).)*\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)
# Names of documented arguments and attributes.
_NAME: Final = re.compile(r"^ +\**\w+:", re.MULTILINE)


def package(name: str) -> Texts:
    """The prose of each module of a package, without its subpackages."""
    for path in sorted((ROOT / name).glob("*.py")):
        yield path.relative_to(ROOT).as_posix(), prose(path.read_text(encoding="utf-8"))


@cache
def prose(source: str) -> str:
    """The docstrings, comments and messages of a module, on the lines where they are."""
    lines = [""] * (source.count("\n") + 2)
    number, end = 1, 0
    for match in _PYTHON.finditer(source):
        if match[0].startswith("#"):
            number, end = number + source.count("\n", end, match.start()), match.start()
            lines[number] = match[0]
    for node in ast.walk(ast.parse(source)):
        # A string without a space is a name or a value.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            text = _NAME.sub("", node.value)
            for number, line in enumerate(text.split("\n"), node.lineno):
                lines[min(number, node.end_lineno or number)] += f" {line}"
    return "\n".join(lines[1:]).replace("``", "`")


# Folders with crates of Rust, and the benches.
CRATES: Final = ("rust/core", "rust/cpu", "rust/py", "benches")

# A comment, a string, or a character, which may be a quotation mark.
_RUST: Final = re.compile(
    r"""//[^\n]*|r(#*)".*?"\1|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL
)
_PLACEHOLDER: Final = re.compile(r"\{[^{}\n]*\}")


def crate(name: str) -> Texts:
    """The prose of each module of a crate, its tests included."""
    for path in sorted((ROOT / name).rglob("*.rs")):
        yield path.relative_to(ROOT).as_posix(), rust_prose(path.read_text(encoding="utf-8"))


@cache
def rust_prose(source: str) -> str:
    """The comments and messages of a module of Rust, on the lines where they are."""
    text, end = "", 0
    for match in _RUST.finditer(source):
        found = match[0]
        if not found.startswith("//"):
            found = _PLACEHOLDER.sub("", found)
            # A string without a space is a name or a value.
            if " " not in found:
                continue
        text += "\n" * source.count("\n", end, match.start()) + f" {found}"
        end = match.end()
    return text


ROOMS: Final[dict[str, Callable[[], Texts]]] = {
    "pages": pages,
    **{name: partial(package, name) for name in PACKAGES},
    **{name: partial(crate, name) for name in CRATES},
}


def _blank(match: re.Match[str]) -> str:
    """As many lines, without a word."""
    return "\n" * match[0].count("\n")


def offences(text: str) -> Iterator[tuple[int, str, str]]:
    """The line of each word of the dialect, the word, and what to write."""
    text = _CODE.sub(_blank, _MADE.sub(_blank, text))
    for phrase in ALLOWED:
        text = re.sub(phrase, _blank, text)
    if not _ANY_OF_IT.search(text.lower()):  # as nearly always
        return
    for pattern, better in DIALECT.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            yield text.count("\n", 0, match.start()) + 1, match[0], better


@pytest.mark.parametrize("room", ROOMS)
def test_no_word_of_the_dialect(room: str) -> None:
    found = [
        f"{name}:{line}: {word!r} (write: {better})"
        for name, text in ROOMS[room]()
        for line, word, better in sorted(offences(text))
    ]
    assert not found, "\n".join(found)


def test_exceptions_are_used() -> None:
    texts = [text for read in ROOMS.values() for _, text in read()]
    unused = [phrase for phrase in ALLOWED if not any(re.search(phrase, text) for text in texts)]
    assert not unused


def test_the_list_finds_the_dialect() -> None:
    dialect = "Whoever asked\nis told `who` the likeliest guess is."
    found = [(line, word) for line, word, _ in offences(dialect)]
    assert found == [(2, "guess"), (1, "Whoever"), (2, "likeliest"), (1, "asked"), (2, "told")]


def test_the_list_finds_the_dialect_in_rust() -> None:
    rust = """let asked = '"'; // as `who`
    /// A guess.
    panic!("no room for {mail} \\
        behind {guess}", "told");
    """
    found = [(line, word) for line, word, _ in offences(rust_prose(rust))]
    assert found == [(2, "guess"), (4, "behind"), (3, "room")]

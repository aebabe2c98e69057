"""Checks of a GGUF file's header against the bytes of the file.

The reader of the gguf package creates objects for each declared element: for an array of 2^60
numbers in a file of a hundred bytes it would run indefinitely.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_FIELDS: Final = 65_536
MAX_TENSORS: Final = 65_536
# Maximum elements of all arrays; a vocabulary of 200,000 tokens has 850,000 with merges and types.
MAX_ELEMENTS: Final = 4_000_000
# Versions of the reader; it reports others.
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
# Bytes of a value, by type; those of strings and arrays differ.
_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def check_header(path: Path) -> None:
    """Check that everything that a header declares before the tensors is in the file.

    Args:
        path: File that begins with ``GGUF``.

    Raises:
        ValueError: Names what is declared, and what the file has.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _Walk(content, len(content)).check()


@dataclass(slots=True)
class _Walk:
    """A parser of the header; ``at`` is the offset of the next byte."""

    content: mmap.mmap
    size: int
    at: int = 4
    order: str = "<"
    num_elements: int = 0

    def check(self) -> None:
        """Check the header; see `check_header`."""
        version = self.number("I")
        if not version & 0xFFFF:  # written with the other byte order
            self.at, self.order = 4, ">"
            version = self.number("I")
        if version not in _VERSIONS:
            return
        num_tensors, num_fields = self.number("Q"), self.number("Q")
        for what, number, most in (
            ("tensors", num_tensors, MAX_TENSORS),
            ("fields", num_fields, MAX_FIELDS),
        ):
            if number > most:
                raise ValueError(f"it announces {number} {what}; accepted are at most {most}")
        for _ in range(num_fields):
            self.skip_string("a field's name")
            self.skip_value(self.number("I"))

    def number(self, kind: str) -> int:
        """Read the next number of a `struct` type."""
        width = struct.calcsize(kind)
        self.skip(width, "a number")
        (found,) = struct.unpack_from(self.order + kind, self.content, self.at - width)
        return int(found)

    def skip(self, num_bytes: int, what: str) -> None:
        """Skip bytes.

        Raises:
            ValueError: The file is too short.
        """
        if num_bytes > self.size - self.at:
            raise ValueError(
                f"it announces {what} of {num_bytes} bytes at byte {self.at} of {self.size}"
            )
        self.at += num_bytes

    def skip_string(self, what: str) -> None:
        """Skip a length and that many bytes."""
        self.skip(self.number("Q"), what)

    def skip_value(self, kind: int) -> None:
        """Skip a field's value."""
        if kind == _STRING:
            self.skip_string("a text")
        elif kind == _ARRAY:
            self.skip_array(self.number("I"), self.number("Q"))
        else:
            self.skip(self.width(kind), "a number")

    def skip_array(self, kind: int, count: int) -> None:
        """Skip an array of strings or numbers."""
        self.num_elements += count
        if self.num_elements > MAX_ELEMENTS:
            raise ValueError(
                f"its arrays announce {self.num_elements} elements; accepted are at most "
                f"{MAX_ELEMENTS}"
            )
        if kind == _STRING:
            for _ in range(count):
                self.skip_string("a text")
        else:
            self.skip(self.width(kind) * count, "an array")

    def width(self, kind: int) -> int:
        """Bytes of a number of a type."""
        if kind not in _WIDTHS:
            raise ValueError(f"it has a value of type {kind}, or arrays within arrays")
        return _WIDTHS[kind]

"""A GGUF file's header: its fields, and checks against the bytes of the file.

The reader of the gguf package creates objects for each declared element: for an array of 2^60
numbers in a file of a hundred bytes it would run indefinitely.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAX_FIELDS: Final = 65_536
MAX_TENSORS: Final = 65_536
# Maximum elements of all arrays; a vocabulary of 200,000 tokens has 850,000 with merges and types.
MAX_ELEMENTS: Final = 4_000_000
# Bytes of a text in a list: of a token or a merge; the longest known have some hundred.
MAX_TOKEN_BYTES: Final = 4096
# Bytes of another text; chat templates have some kilobytes.
MAX_TEXT_BYTES: Final = 16 << 20
# Versions of the reader; it reports others.
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
# Formats of `struct` of a value, by type; strings and arrays have none.
_FORMATS: Final = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True),
)


def check_header(path: Path) -> None:
    """Check that everything that a header declares before the tensors is in the file.

    Args:
        path: File that begins with ``GGUF``.

    Raises:
        ValueError: Names what is declared, and what the file has.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        _Walk(content, len(content)).check()


def read_fields(path: Path, *prefixes: str) -> dict[str, Any]:
    """Read the fields of a header whose names start with one of these prefixes.

    Args:
        path: File that begins with ``GGUF``.
        *prefixes: As "general.", "tokenizer.".

    Returns:
        Values by name: numbers, flags, texts, and lists of them.

    Raises:
        ValueError: The header declares more than the file has, has a text of invalid UTF-8, or is
            of another version.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _Walk(content, len(content)).fields(prefixes)


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
        if self.version() in _VERSIONS:
            for _ in range(self.num_fields()):
                self.skip_string("a field's name")
                self.skip_value(self.number("I"))

    def fields(self, prefixes: tuple[str, ...]) -> dict[str, Any]:
        """Read fields; see `read_fields`."""
        if (version := self.version()) not in _VERSIONS:
            raise ValueError(f"it is GGUF of version {version}; accepted are {_VERSIONS}")
        found: dict[str, Any] = {}
        for _ in range(self.num_fields()):
            name, kind = self.string("a field's name"), self.number("I")
            if name.startswith(prefixes):
                found[name] = self.value(kind)
            else:
                self.skip_value(kind)
        return found

    def version(self) -> int:
        """Read the version, which shows the byte order."""
        version = self.number("I")
        if not version & 0xFFFF:  # written with the other byte order
            self.at, self.order = 4, ">"
            version = self.number("I")
        return version

    def num_fields(self) -> int:
        """Read the numbers of tensors and of fields; return the second."""
        num_tensors, num_fields = self.number("Q"), self.number("Q")
        for what, number, most in (
            ("tensors", num_tensors, MAX_TENSORS),
            ("fields", num_fields, MAX_FIELDS),
        ):
            if number > most:
                raise ValueError(f"it announces {number} {what}; accepted are at most {most}")
        return num_fields

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
        self.count_elements(count)
        if kind == _STRING:
            for _ in range(count):
                self.skip_string("a text")
        else:
            self.skip(self.width(kind) * count, "an array")

    def count_elements(self, count: int) -> None:
        """Count the elements of an array.

        Raises:
            ValueError: Arrays have too many.
        """
        self.num_elements += count
        if self.num_elements > MAX_ELEMENTS:
            raise ValueError(
                f"its arrays announce {self.num_elements} elements; accepted are at most "
                f"{MAX_ELEMENTS}"
            )

    def width(self, kind: int) -> int:
        """Bytes of a number of a type."""
        if kind not in _FORMATS:
            raise ValueError(f"it has a value of type {kind}, or arrays within arrays")
        return struct.calcsize(f"<{_FORMATS[kind]}")

    def string(self, what: str) -> str:
        """Read a length and that many bytes of UTF-8."""
        length = self.number("Q")
        if length > MAX_TEXT_BYTES:
            raise ValueError(
                f"it announces {what} of {length} bytes; accepted are at most {MAX_TEXT_BYTES}"
            )
        self.skip(length, what)
        return self.content[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        """Read a field's value."""
        if kind == _STRING:
            return self.string("a text")
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        return self.numbers(kind, 1)[0]

    def array(self, kind: int, count: int) -> list[Any]:
        """Read an array of strings or numbers."""
        self.count_elements(count)
        return self.strings(count) if kind == _STRING else list(self.numbers(kind, count))

    def numbers(self, kind: int, count: int) -> tuple[Any, ...]:
        """Read consecutive numbers."""
        num_bytes = self.width(kind) * count
        self.skip(num_bytes, "numbers")
        form = f"{self.order}{count}{_FORMATS[kind]}"
        return struct.unpack_from(form, self.content, self.at - num_bytes)

    def strings(self, count: int) -> list[str]:
        """Read consecutive texts, hundreds of thousands of them without a call for each."""
        content, at, size, found = self.content, self.at, self.size, []
        read_length = struct.Struct(f"{self.order}Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + read_length(content, at)[0] if start <= size else start
            if at > min(size, start + MAX_TOKEN_BYTES):
                raise ValueError(
                    f"it announces a text from byte {start} to {at} of {size}; accepted are at "
                    f"most {MAX_TOKEN_BYTES} bytes"
                )
            found.append(content[start:at].decode())
        self.at = at
        return found

"""The header of a GGUF file, checked against the bytes of the file.

Costs: a vocabulary is passed over, not read: some 10 ms for 100,000 strings.
"""

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from pagedserve.models.load.gguf_header import (
    MAX_ELEMENTS,
    MAX_FIELDS,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
)
from pagedserve.native.choice import OTHER_BACKEND
from pagedserve.native.families import UnsupportedError
from pagedserve.native.mapped import STORAGES, MappedFile, StoredTensor

_VERSIONS: Final = (2, 3)
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_STRING, _ARRAY = 8, 9
# `struct` types of a field's numbers.
_NUMBERS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_TYPES: Final = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    30: "BF16",
}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array field, whose elements were passed over.

    Attributes:
        count: Number of elements.
    """

    count: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A mapped GGUF file.

    Attributes:
        fields: Metadata by key: numbers, texts, and `GgufArray`.
        tensors: Tensors by name.
    """

    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Map a file, and read its header.

    Raises:
        ValueError: It is no GGUF file, or cut short or damaged; names what is declared and what the
            file has.
        UnsupportedError: It is of another version, or has tensors of another type.
    """
    file = MappedFile.open(path)
    if file.content[:4] != b"GGUF":
        raise ValueError(
            f"{path} is not a GGUF file: it starts with {file.content[:4]!r}, a GGUF file with "
            "b'GGUF'"
        )
    header = _Header(file.content, file.size)
    try:
        return header.read(file)
    except (struct.error, OverflowError) as error:
        raise ValueError(
            f"{path} is cut short or damaged: its header reaches beyond its {file.size} bytes"
        ) from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{path.name}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is cut short or damaged: {error}") from error


class _Entry(NamedTuple):
    """A tensor as the header declares it; the offset is from the first tensor on."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(slots=True)
class _Header:
    """A parser; ``at`` is the offset of the next byte.  `struct.error` is the end of the file."""

    content: mmap.mmap
    size: int
    at: int = 4
    num_elements: int = 0

    def read(self, file: MappedFile) -> GgufFile:
        """Read the header; see `read_gguf`."""
        version = self.number("I")
        if version not in _VERSIONS:
            swapped = " with the other byte order" * (not version & 0xFFFF)
            raise UnsupportedError(f"its version is {version:#x}{swapped}; supported are 2 and 3")
        num_tensors, num_fields = self.number("Q"), self.number("Q")
        _check_count("tensors", num_tensors, MAX_TENSORS)
        _check_count("fields", num_fields, MAX_FIELDS)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self.text()
            if key in fields:
                raise ValueError(f"it has the field {key!r} twice")
            fields[key] = self.value(self.number("I"))
        entries = [self.entry() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise ValueError(f"general.alignment is {alignment}; it must be a multiple of 8")
        start = -(-self.at // alignment) * alignment
        tensors = [self.tensor(file, start, alignment, entry) for entry in entries]
        _check_apart(tensors)
        return GgufFile(fields, {tensor.name: tensor for tensor in tensors})

    def number(self, kind: str) -> Any:
        """Read the next number of a `struct` type."""
        (found,) = struct.unpack_from("<" + kind, self.content, self.at)
        self.at += struct.calcsize(kind)
        return found

    def text(self) -> str:
        """Read a length and as many bytes."""
        length = self.number("Q")
        if length > min(self.size - self.at, MAX_TEXT_BYTES):
            raise ValueError(
                f"it announces a text of {length} bytes at byte {self.at} of {self.size}; accepted "
                f"are at most {MAX_TEXT_BYTES}"
            )
        self.at += length
        return self.content[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """Read a field's value; pass over an array."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if kind not in _NUMBERS:
            raise ValueError(f"it has a value of type {kind}")
        return self.number(_NUMBERS[kind])

    def array(self, kind: int, count: int) -> GgufArray:
        """Pass over an array."""
        self.num_elements += count
        _check_count("elements of arrays", self.num_elements, MAX_ELEMENTS)
        if kind == _STRING:
            self.skip_texts(count)
        elif kind in _NUMBERS:
            self.at += count * struct.calcsize(_NUMBERS[kind])
        else:
            raise ValueError(f"it has an array of type {kind}")
        if self.at > self.size:
            raise ValueError(f"it announces an array that ends at byte {self.at} of {self.size}")
        return GgufArray(count)

    def skip_texts(self, count: int) -> None:
        """Pass over texts."""
        at, content, length_at = self.at, self.content, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + length_at(content, at)[0]
        self.at = at

    def entry(self) -> _Entry:
        """Read the next tensor's entry."""
        name, num_dimensions = self.text(), self.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{name!r} has {num_dimensions} dimensions; it must have 1 to 4")
        sizes = [int(self.number("Q")) for _ in range(num_dimensions)]
        return _Entry(name, tuple(reversed(sizes)), self.number("I"), self.number("Q"))

    def tensor(self, file: MappedFile, start: int, alignment: int, entry: _Entry) -> StoredTensor:
        """Check an entry; tensors begin at byte ``start``."""
        name, shape, kind, offset = entry
        if kind not in _TYPES:
            raise UnsupportedError(
                f"{name!r} is of type {kind}; the native backend reads "
                f"{', '.join(_TYPES.values())}: {OTHER_BACKEND}"
            )
        weights, block_bytes = STORAGES[_TYPES[kind]]
        if (shape[-1] if shape else 1) % weights:
            raise ValueError(
                f"{name!r} has rows of {shape[-1]} weights, no whole blocks of {weights}"
            )
        num_bytes = prod(shape) // weights * block_bytes
        if offset % alignment or start + offset + num_bytes > self.size:
            raise ValueError(
                f"{name!r} of shape {shape} needs {num_bytes} bytes from byte {start + offset}, "
                f"the file has {self.size} and alignment {alignment}"
            )
        return StoredTensor(
            name=name,
            storage=_TYPES[kind],
            shape=shape,
            file=file,
            offset=start + offset,
            num_bytes=num_bytes,
        )


def _check_count(what: str, number: int, most: int) -> None:
    if number > most:
        raise ValueError(f"it announces {number} {what}; accepted are at most {most}")


def _check_apart(tensors: list[StoredTensor]) -> None:
    """Refuse tensors of one name or in the same bytes."""
    if not tensors:
        raise ValueError("it has no tensors")
    ((name, times),) = Counter(tensor.name for tensor in tensors).most_common(1)
    if times > 1:
        raise ValueError(f"it has {name!r} twice")
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            raise ValueError(f"{after.name!r} overlaps {before.name!r}")

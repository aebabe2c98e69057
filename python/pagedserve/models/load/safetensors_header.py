"""The header of a safetensors file, checked against the bytes of the file.

The format: the length of the header in eight bytes, the header in JSON, and the tensors without
gaps.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.regular_files import MAX_SAFETENSORS_HEADER_BYTES

_LENGTH_BYTES: Final = 8
_MAX_DIMENSIONS: Final = 8
# Bytes of a number, by its type.
_WIDTHS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
# Types of `as_float32`, and of the arrays that hold their numbers; of bfloat16 the bits.
FLOATS: Final[dict[str, type[np.generic]]] = {
    "F32": np.float32,
    "BF16": np.uint16,
    "F16": np.float16,
    "F64": np.float64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file, whose bytes were checked to be in it.

    Attributes:
        name: Name in the file.
        storage: Type of its numbers, as the format spells it: "F32".
        shape: Sizes, rows first.
        offset: First byte of it in the file.
        num_bytes: Its bytes.
    """

    name: str
    storage: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _File:
    """A file: its name in errors, its size, and the first byte of its tensors."""

    name: str
    size: int
    start: int


def read_entries(name: str, size: int, read: Callable[[int, int], bytes]) -> list[TensorEntry]:
    """Read the header of a file, and return its tensors in the order of their bytes.

    Args:
        name: Name of the file in errors.
        size: Bytes of the file.
        read: Returns bytes of it, by the first one and their number.

    Raises:
        ValueError: The file is cut short or damaged; names what is declared and what it has.
    """
    num_bytes = _header_bytes(name, size, read(0, min(_LENGTH_BYTES, size)))
    file = _File(name, size, _LENGTH_BYTES + num_bytes)
    declared = _parse(name, read(_LENGTH_BYTES, num_bytes))
    entries = [_entry(file, tensor, fields) for tensor, fields in declared.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    end = file.start
    for entry in entries:
        if entry.offset != end:
            what = "overlaps the one before it" if entry.offset < end else "follows a gap"
            raise ValueError(f"{name} is damaged: {entry.name!r} {what}")
        end += entry.num_bytes
    if end != size:
        raise ValueError(
            f"{name} is cut short or damaged: its tensors end at byte {end}, the file has {size}"
        )
    return entries


def as_float32(stored: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Copy the numbers of a tensor, of one of the `FLOATS`, to float32.

    Those of F64 are rounded, to infinity where they are too large; the others are exact.
    """
    numbers = stored.view(FLOATS[dtype])
    if dtype == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(np.float32)


def _header_bytes(name: str, size: int, length: bytes) -> int:
    num_bytes = int.from_bytes(length, "little")
    most = min(size - _LENGTH_BYTES, MAX_SAFETENSORS_HEADER_BYTES)
    if num_bytes > most:
        raise ValueError(
            f"{name} is cut short, or no safetensors file: it announces a header of "
            f"{num_bytes} bytes, the file has {size}"
        )
    return num_bytes


def _parse(file_name: str, header: bytes) -> dict[str, Any]:
    """Entries of a header, by the names of the tensors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{file_name} has {twice!r} twice")
        return found

    try:
        content = json.loads(header, object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file_name} is damaged: its header is no JSON") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file_name} is damaged: its header is no object")  # noqa: TRY004
    return {name: entry for name, entry in content.items() if name != "__metadata__"}


def _entry(file: _File, name: str, entry: Any) -> TensorEntry:
    """The tensor that an entry declares."""
    fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    dtype = fields.get("dtype")
    shape, offsets = (_sizes(fields.get(key)) for key in ("shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        raise ValueError(
            f"{file.name} has {name!r} of dtype {str(dtype)[:80]!r}; known are {', '.join(_WIDTHS)}"
        )
    if shape is None or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{file.name} has {name!r} of shape {str(fields.get('shape'))[:80]}")
    if offsets is None or len(offsets) != 2:  # noqa: PLR2004  # first, last
        given = str(fields.get("data_offsets"))[:80]
        raise ValueError(f"{file.name} has {name!r} at {given}")
    first, last = offsets
    num_bytes, size = prod(shape) * _WIDTHS[dtype], file.size
    if last - first != num_bytes or file.start + last > size:
        raise ValueError(
            f"{file.name} is cut short or damaged: {name!r} of shape {shape} needs "
            f"{num_bytes} bytes and has bytes {first} to {last} of {size - file.start}"
        )
    return TensorEntry(name, dtype, tuple(shape), file.start + first, num_bytes)


def _sizes(value: Any) -> list[int] | None:
    """A list of integers from 0; None for anything else."""
    if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value):
        return value
    return None

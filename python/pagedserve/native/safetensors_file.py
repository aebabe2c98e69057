"""The header of a safetensors file, checked against the bytes of the file.

The format: the length of the header in eight bytes, the header in JSON, and the tensors without
gaps.
"""

import json
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from pagedserve.native.stored import StoredTensor, WeightFile
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


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Open a file, and return its tensors by name.

    Raises:
        ValueError: The file is cut short or damaged; names what is declared and what it has.
    """
    file = WeightFile(path)
    start = _LENGTH_BYTES + _header_bytes(file)
    file.read_ahead()
    entries = _parse(path.name, file.read(_LENGTH_BYTES, start - _LENGTH_BYTES))
    tensors = [_tensor(file, start, name, entry) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the one before it" if tensor.offset < end else "follows a gap"
            raise ValueError(f"{path.name} is damaged: {tensor.name!r} {what}")
        end += tensor.num_bytes
    if end != file.size:
        raise ValueError(
            f"{path.name} is cut short or damaged: its tensors end at byte {end}, the file has "
            f"{file.size}"
        )
    return {tensor.name: tensor for tensor in tensors}


def _header_bytes(file: WeightFile) -> int:
    num_bytes = int.from_bytes(file.read(0, min(_LENGTH_BYTES, file.size)), "little")
    most = min(file.size - _LENGTH_BYTES, MAX_SAFETENSORS_HEADER_BYTES)
    if num_bytes > most:
        raise ValueError(
            f"{file.path.name} is cut short, or no safetensors file: it announces a header of "
            f"{num_bytes} bytes, the file has {file.size}"
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


def _tensor(file: WeightFile, start: int, name: str, entry: Any) -> StoredTensor:
    """The tensor of an entry; tensors begin at byte ``start``."""
    fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    dtype = fields.get("dtype")
    shape, offsets = (_sizes(fields.get(key)) for key in ("shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        raise ValueError(
            f"{file.path.name} has {name!r} of dtype {str(dtype)[:80]!r}; known are "
            f"{', '.join(_WIDTHS)}"
        )
    if shape is None or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{file.path.name} has {name!r} of shape {str(fields.get('shape'))[:80]}")
    if offsets is None or len(offsets) != 2:  # noqa: PLR2004  # first, last
        given = str(fields.get("data_offsets"))[:80]
        raise ValueError(f"{file.path.name} has {name!r} at {given}")
    first, last = offsets
    num_bytes = prod(shape) * _WIDTHS[dtype]
    if last - first != num_bytes or start + last > file.size:
        raise ValueError(
            f"{file.path.name} is cut short or damaged: {name!r} of shape {shape} needs "
            f"{num_bytes} bytes and has bytes {first} to {last} of {file.size - start}"
        )
    return StoredTensor(
        name=name,
        storage=dtype,
        shape=tuple(shape),
        file=file,
        offset=start + first,
        num_bytes=num_bytes,
    )


def _sizes(value: Any) -> list[int] | None:
    """A list of integers from 0; None for anything else."""
    if isinstance(value, list) and all(type(size) is int and size >= 0 for size in value):
        return value
    return None

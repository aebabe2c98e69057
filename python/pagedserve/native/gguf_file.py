"""A GGUF file of weights: its header, and its tensors checked against the bytes of the file."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

from pagedserve.models.load.gguf_header import (
    GgufHeader,
    GgufVersionError,
    TensorEntry,
    header_of,
)
from pagedserve.native.choice import OTHER_BACKEND
from pagedserve.native.families import UnsupportedError
from pagedserve.native.stored import STORAGES, StoredTensor, WeightFile

# Storages by the number of their type.
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
    20: "IQ4_NL",
    23: "IQ4_XS",
    30: "BF16",
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file.

    Attributes:
        header: Its header.
        tensors: Tensors by name.
    """

    header: GgufHeader
    tensors: dict[str, StoredTensor]

    @property
    def fields(self) -> dict[str, Any]:
        """Metadata by key."""
        return self.header.fields


def read_gguf(path: Path) -> GgufFile:
    """Open a file, read its header, and check its tensors.

    Raises:
        ValueError: It is no GGUF file, or cut short or damaged; names what is declared and what the
            file has.
        UnsupportedError: It is of another version or byte order, or has tensors of another type.
    """
    file = WeightFile(path)
    try:
        header = header_of(path, file.fileno(), file.size)
    except GgufVersionError as error:
        raise UnsupportedError(str(error)) from error
    if header.is_big_endian:
        raise UnsupportedError(
            f"{path.name}: it was written with the other byte order: {OTHER_BACKEND}"
        )
    file.read_ahead()
    try:
        tensors = [_tensor(file, header, entry) for entry in header.tensors]
        _check_apart(tensors)
    except UnsupportedError as error:
        raise UnsupportedError(f"{path.name}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is cut short or damaged: {error}") from error
    return GgufFile(header, {tensor.name: tensor for tensor in tensors})


def _tensor(file: WeightFile, header: GgufHeader, entry: TensorEntry) -> StoredTensor:
    """Check an entry."""
    name, shape, kind, offset = entry
    if kind not in _TYPES:
        raise UnsupportedError(
            f"{name!r} is of type {kind}; the native backend reads {', '.join(_TYPES.values())}: "
            f"{OTHER_BACKEND}"
        )
    weights, block_bytes = STORAGES[_TYPES[kind]]
    if shape[-1] % weights:
        raise ValueError(f"{name!r} has rows of {shape[-1]} weights, no whole blocks of {weights}")
    num_bytes = prod(shape) // weights * block_bytes
    start = header.data_offset + offset
    if offset % header.alignment or start + num_bytes > file.size:
        raise ValueError(
            f"{name!r} of shape {shape} needs {num_bytes} bytes from byte {start}, the file has "
            f"{file.size} and alignment {header.alignment}"
        )
    return StoredTensor(name, _TYPES[kind], shape, start, num_bytes, file)


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

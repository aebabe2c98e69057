"""Weight files mapped into memory, and the tensors in them."""

import mmap
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from pagedserve.regular_files import opened

# Names of the storages that Rust reads (`pagedserve._core.cpu.pack_rows`): weights and bytes of a
# block.
STORAGES: Final[dict[str, tuple[int, int]]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file of weights, read by the system as its pages are used.

    Attributes:
        path: The file.
        content: Its bytes, as long as this object is referenced.
        address: Address of the first byte.
    """

    path: Path
    content: mmap.mmap
    address: int
    _view: NDArray[np.uint8] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a regular file.

        Raises:
            ValueError: It cannot be read, or is empty or no regular file.
        """
        with opened(path) as (file, num_bytes):
            if not num_bytes:  # it has no mapping
                raise ValueError(f"{path.name} is empty")
            content = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ)
        view = np.frombuffer(content, np.uint8)
        return cls(path, content, int(view.ctypes.data), view)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._view)

    def bytes_of(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """View of some bytes, which are in the file."""
        return self._view[offset : offset + num_bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file, whose bytes were checked to be in it.

    Attributes:
        name: Name in the file.
        storage: Type of its numbers, in the spelling of its format; see `STORAGES`.
        shape: Sizes, rows first.
        file: The file.
        offset: First byte of it in the file.
        num_bytes: Its bytes.
    """

    name: str
    storage: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int
    num_bytes: int

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.file.address + self.offset

    @property
    def num_weights(self) -> int:
        """Number of its weights."""
        return prod(self.shape)

    def equals(self, other: "StoredTensor") -> bool:
        """Whether another tensor has the same shape and the same bytes."""
        ours = self.file.bytes_of(self.offset, self.num_bytes)
        theirs = other.file.bytes_of(other.offset, other.num_bytes)
        is_alike = (self.storage, self.shape) == (other.storage, other.shape)
        return is_alike and np.array_equal(ours, theirs)

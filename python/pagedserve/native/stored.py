"""Open weight files, and the tensors stored in them."""

import os
import weakref
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pagedserve.models.load.safetensors_header import TensorEntry
from pagedserve.regular_files import opened

# Names of the storages that Rust reads (`pagedserve._core.cpu.pack_layers`): weights and bytes of a
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
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}

# Those whose blocks Rust multiplies without converting them (`PackedWeights`).
BLOCK_FORMATS: Final = frozenset(
    {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}
)

# Bytes with a scale for each output feature, which files store in another tensor.
WHOLE_ROWS: Final = "I8_ROWS"

# The same of inputs that Rust turns (rust/cpu/src/bytes/turn.rs), made at load of any weights.
TURNED_ROWS: Final = "I8_TURNED"

# Storages of matrices of quantized directories (`quantized_files`), which Rust multiplies as well.
MADE_STORAGES: Final[dict[str, tuple[int, int]]] = {
    WHOLE_ROWS: (1, 1),
    "Q4_0_64": (64, 34),
    "Q4_1_64": (64, 36),
}

# Weights and bytes of a block of each format of panels.
SIZES: Final = {**STORAGES, **MADE_STORAGES, TURNED_ROWS: (64, 64)}

# Formats with a scale for each output feature.
SCALED: Final = (WHOLE_ROWS, TURNED_ROWS)

# Fewest weights of a block of `BLOCKS`.
BLOCK_WEIGHTS: Final = 32

# Blocks as arrays; two 4-bit numbers per byte, the first half of them in the lower halves.
BLOCKS: Final[dict[str, np.dtype[Any]]] = {
    "Q4_0": np.dtype([("scale", "<f2"), ("numbers", "u1", 16)]),
    "Q4_1": np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("numbers", "u1", 16)]),
    "Q4_0_64": np.dtype([("scale", "<f2"), ("numbers", "u1", 32)]),
    "Q4_1_64": np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("numbers", "u1", 32)]),
    "Q8_0": np.dtype([("scale", "<f2"), ("numbers", "i1", 32)]),
}

# Bytes of two tensors that are compared at once.
_PIECE: Final = 1 << 20


class WeightFile:
    """A file of weights, open as long as this object is referenced.

    It is read, not mapped: a page of a map that is no longer in the file ends the process.

    Attributes:
        path: The file.
        size: Its bytes when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open a regular file.

        Raises:
            ValueError: It cannot be read, or is empty or no regular file.
        """
        with opened(path) as (file, size):
            if not size:
                raise ValueError(f"{path.name} is empty")
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self.path = path
        self.size = size

    def fileno(self) -> int:
        """File descriptor."""
        return self._descriptor

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read some bytes.

        Raises:
            ValueError: The file has become shorter, or cannot be read.
        """
        pieces = []
        while num_bytes:
            try:
                piece = os.pread(self.fileno(), num_bytes, offset)
            except OSError as error:
                raise ValueError(f"{self.path.name} cannot be read: {error.strerror}") from error
            if not piece:
                raise ValueError(
                    f"{self.path.name} was cut short while it was read: it had {self.size} bytes "
                    f"and ends before byte {offset + num_bytes}"
                )
            pieces.append(piece)
            offset, num_bytes = offset + len(piece), num_bytes - len(piece)
        return b"".join(pieces)

    def read_ahead(self) -> None:
        """Let the system read the file into its cache, in the background."""
        os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


class MemoryFile(WeightFile):
    """Weights converted in memory, read like those of a file; `append` is thread-safe."""

    def __init__(self) -> None:
        """Create an empty one."""
        self._descriptor = os.memfd_create("pagedserve-weights", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.path = Path("converted weights")
        self.size = 0
        self._lock = Lock()

    def append(self, content: NDArray[Any]) -> int:
        """Append the bytes of a contiguous array; return the offset of the first."""
        rest = content.reshape(-1).view(np.uint8).data
        with self._lock:
            first, self.size = self.size, self.size + len(rest)
        offset = first
        while rest:
            num_bytes = os.pwrite(self.fileno(), rest, offset)
            rest, offset = rest[num_bytes:], offset + num_bytes
        return first


@dataclass(frozen=True, slots=True)
class StoredTensor(TensorEntry):
    """A tensor in an open file; its storage is of `STORAGES` or `MADE_STORAGES`, or is refused.

    Attributes:
        file: The file.
        scales: Scales of output features of `WHOLE_ROWS`, float32 ``[N]``; None for others.
    """

    file: WeightFile
    scales: NDArray[np.float32] | None = field(default=None, compare=False)

    @property
    def num_weights(self) -> int:
        """Number of its weights."""
        return prod(self.shape)

    @property
    def kind(self) -> tuple[str, tuple[int, ...], bytes | None]:
        """What equal tensors share beside their bytes in the file."""
        scales = None if self.scales is None else self.scales.tobytes()
        return self.storage, self.shape, scales

    def read(self) -> bytes:
        """Read its bytes; see `WeightFile.read`."""
        return self.file.read(self.offset, self.num_bytes)

    def equals(self, other: "StoredTensor") -> bool:
        """Whether another tensor has the same shape and the same bytes; see `WeightFile.read`."""
        if self.kind != other.kind:
            return False
        return all(
            self.file.read(self.offset + start, num_bytes)
            == other.file.read(other.offset + start, num_bytes)
            for start in range(0, self.num_bytes, _PIECE)
            for num_bytes in [min(_PIECE, self.num_bytes - start)]
        )

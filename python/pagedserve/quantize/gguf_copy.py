"""A copy of a GGUF file in which matrices have other formats.

The fields of the file, its tokenizer among them, are copied byte by byte, and so are tensors that
are not quantized; each other matrix is read by Rust and rounded some rows at a time.

Invariants:

1. A file has its name only when it is complete: it is written under another one beside it.

Memory: one matrix in float32.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

import numpy as np
from numpy.typing import NDArray

from pagedserve.checks import check_directory
from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.host_ops.threads import num_compute_threads
from pagedserve.models.load.bars import Bar
from pagedserve.models.load.gguf_header import GgufHeader
from pagedserve.native.checkpoint import Checkpoint
from pagedserve.native.packing import Packer, Part
from pagedserve.native.rounding import rounded_to_blocks
from pagedserve.native.stored import StoredTensor
from pagedserve.quantize.targets import BlockFormat, Target

_VERSION: Final = 3
_UINT32: Final = 4  # type of a field
# Fields that a quantized file has: the version of the formats of blocks, and that of most matrices.
_QUANTIZATION_VERSION: Final = ("general.quantization_version", 2)
_FILE_TYPE: Final = "general.file_type"
# Bytes that are copied, and weights that are rounded, at once.
_COPIED_BYTES: Final = 1 << 20
_ROUNDED_WEIGHTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class GgufCopy:
    """What is written: a file's header, and its tensors with their formats.

    Attributes:
        checkpoint: Weights of the file.
        header: Its header.
        tensors: Tensors in the order of the file, with the format that each gets; None if it is
            copied.
        file_type: Value of ``general.file_type``.
    """

    checkpoint: Checkpoint
    header: GgufHeader
    tensors: Sequence[tuple[StoredTensor, BlockFormat | None]]
    file_type: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, header: GgufHeader, target: Target) -> Self:
        """Choose the format of each tensor.

        Raises:
            ConfigError: No tensor gets another one.
        """
        tensors = list(target.formats(checkpoint))
        if not any(chosen for _, chosen in tensors):
            found = sorted({tensor.storage for tensor, _ in tensors if len(tensor.shape) > 1})
            raise ConfigError(
                f"model {checkpoint.model!r}: none of its matrices, which are {', '.join(found)}, "
                "would change: use the file as it is, with quantization 'gguf'"
            )
        return cls(checkpoint, header, tensors, target.file_type)

    def write(self, path: Path) -> None:
        """Write the file, with a progress bar.

        Raises:
            ConfigError: It cannot be written.
            ModelLoadError: A weight is not finite, or too large for its format, or the file that is
                read has become shorter.
        """
        total = sum(tensor.num_bytes for tensor, _ in self.tensors)
        with (
            _new_file(path) as file,
            Bar(total=total, desc="quantizing", unit="B", unit_scale=True) as bar,
        ):
            file.write(self._header())
            for tensor, chosen in self.tensors:
                for written, num_read in self._content(tensor, chosen):
                    file.write(written)
                    bar.update(num_read)
                file.write(self._padding(file.tell()))

    def _header(self) -> bytes:
        """All that lies before the first tensor."""
        changed = dict([_QUANTIZATION_VERSION, (_FILE_TYPE, self.file_type)])
        source = self.tensors[0][0]
        fields = [
            _read(self.checkpoint, source, start, end - start)
            for name, (start, end) in self.header.spans.items()
            if name not in changed
        ]
        fields += [
            _text(name) + struct.pack("<II", _UINT32, value) for name, value in changed.items()
        ]
        counts = struct.pack("<IQQ", _VERSION, len(self.tensors), len(fields))
        found = b"".join([b"GGUF", counts, *fields, *self._entries()])
        return found + self._padding(len(found))

    def _entries(self) -> Iterator[bytes]:
        """Entry of each tensor: its name, sizes, type and first byte."""
        offset = 0
        for (tensor, chosen), entry in zip(self.tensors, self.header.tensors, strict=True):
            sizes = tensor.shape[::-1]
            number = entry.kind if chosen is None else chosen.number
            yield _text(tensor.name) + struct.pack(
                f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset
            )
            offset += tensor.num_bytes if chosen is None else chosen.num_bytes(tensor.num_weights)
            offset += len(self._padding(offset))

    def _padding(self, offset: int) -> bytes:
        """Zeros up to the next byte where a tensor may begin."""
        return bytes(-offset % self.header.alignment)

    def _content(
        self, tensor: StoredTensor, chosen: BlockFormat | None
    ) -> Iterator[tuple[bytes, int]]:
        """Bytes of a tensor, with the number of those that were read for them."""
        if chosen is None:
            for start in range(0, tensor.num_bytes, _COPIED_BYTES):
                num_bytes = min(_COPIED_BYTES, tensor.num_bytes - start)
                yield _read(self.checkpoint, tensor, tensor.offset + start, num_bytes), num_bytes
            return
        row_bytes = tensor.num_bytes // tensor.shape[0]
        for rows in _rows(self.checkpoint, tensor):
            if (largest := float(np.abs(rows).max())) > chosen.largest:
                raise ModelLoadError(
                    f"model {self.checkpoint.model!r}: {tensor.name!r} has a weight of magnitude "
                    f"{largest:g}; those of {chosen.name} are at most {chosen.largest:g}"
                )
            yield rounded_to_blocks(rows, chosen.name).tobytes(), len(rows) * row_bytes


def check_output(path: Path) -> None:
    """Check that a GGUF file can be created.

    Raises:
        ConfigError: It exists, has another suffix, or has no directory.
    """
    if path.suffix != ".gguf":
        raise ConfigError(f"output: {str(path)!r} must end in .gguf, by which files are known")
    if os.path.lexists(path):
        raise ConfigError(f"output: {str(path)!r} exists; give another name, or delete it first")
    check_directory(path)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the context ends without an error, and is else deleted.

    Raises:
        ConfigError: It cannot be written.
    """
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with work.open("xb") as file:
            yield file
        work.rename(path)
    except OSError as error:
        raise ConfigError(f"output: cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):  # renamed, or never created
            work.unlink()


def _text(text: str) -> bytes:
    """A text after its length."""
    content = text.encode(errors="surrogateescape")
    return struct.pack("<Q", len(content)) + content


def _read(checkpoint: Checkpoint, tensor: StoredTensor, offset: int, num_bytes: int) -> bytes:
    """Read bytes of the file of a tensor.

    Raises:
        ModelLoadError: It has become shorter, or cannot be read.
    """
    try:
        return tensor.file.read(offset, num_bytes)
    except ValueError as error:
        raise ModelLoadError(f"model {checkpoint.model!r}: {error}") from error


def _rows(checkpoint: Checkpoint, tensor: StoredTensor) -> Iterator[NDArray[np.float32]]:
    """Some rows at a time of a matrix, float32 ``[n, K]``.

    Raises:
        ModelLoadError: A weight is not finite, or the file has become shorter.
    """
    num_threads = num_compute_threads()
    packer = Packer(checkpoint, "float32", num_threads)
    planned = packer.plan(Part(tensor.name))
    packer.pack()
    weights = packer.weights(planned)
    num_rows, size = tensor.shape
    height = max(1, _ROUNDED_WEIGHTS // size)
    for first in range(0, num_rows, height):
        index = np.arange(first, min(first + height, num_rows), dtype=np.int32)
        rows = np.empty((len(index), size), np.float32)
        weights.gather(index, rows.ctypes.data, num_threads)
        yield rows

"""A safetensors file mapped into memory."""

from pathlib import Path

from pagedserve.models.safetensors_header import read_entries
from pagedserve.native.mapped import MappedFile, StoredTensor


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Map a file, and return its tensors by name.

    Raises:
        ValueError: The file is cut short or damaged; names what is declared and what it has.
    """
    file = MappedFile.open(path)
    return {
        entry.name: StoredTensor(
            name=entry.name,
            storage=entry.dtype,
            shape=entry.shape,
            file=file,
            offset=entry.offset,
            num_bytes=entry.num_bytes,
        )
        for entry in read_entries(path.name, file.content)
    }

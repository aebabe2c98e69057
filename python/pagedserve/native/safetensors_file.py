"""A safetensors file, of which the header is read."""

from pathlib import Path

from pagedserve.models.load.safetensors_header import read_entries
from pagedserve.native.stored import StoredTensor, WeightFile


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Open a file, and return its tensors by name.

    Raises:
        ValueError: The file is cut short or damaged; names what is declared and what it has.
    """
    file = WeightFile(path)
    file.read_ahead()
    return {
        entry.name: StoredTensor(
            entry.name, entry.storage, entry.shape, entry.offset, entry.num_bytes, file
        )
        for entry in read_entries(path.name, file.size, file.read)
    }

"""The files with a model's weights in a directory in Hugging Face format."""

import json
from pathlib import Path

from pagedserve.regular_files import is_file


def weight_files(directory: Path) -> list[Path]:
    """The files with weights that transformers reads: one, or those of an index."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = directory / f"{single}.index.json"
        if is_file(directory / single):
            return [directory / single]
        if is_file(index):
            weight_map = json.loads(index.read_bytes())["weight_map"]
            return [directory / shard for shard in sorted(set(weight_map.values()))]
    return []

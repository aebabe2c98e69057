"""What transformers answers on the real model, recorded as data under ``tests/references``.

A record is gzipped JSON: what it was made with, and the answers of one kind of question.  The
modules ``greedy``, ``beams`` and ``logprobs`` beside this one say what is asked; ``record`` asks it
(``make references``), and tests/engine/test_references.py asks again whether it still holds.
"""

import gzip
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pagedserve.models.load.convert import converted_directory
from pagedserve.models.load.sources import resolve_model

FOLDER = Path(__file__).parents[1] / "references"
SOURCE = Path(__file__).parents[2] / "LICENSE"


def weights_directory() -> Path:
    """Where the float32 weights of the real model are, for transformers as for us."""
    return converted_directory(resolve_model("smollm2").path)


def weights_hash() -> str:
    """SHA-256 of the real model's parameters, whatever order they are stored in."""
    digest = hashlib.sha256()
    with safe_open(weights_directory() / "model.safetensors", framework="numpy") as weights:
        for name in sorted(weights.keys()):
            values = weights.get_tensor(name)
            digest.update(f"{name} {values.dtype} {values.shape}".encode())
            digest.update(values.data)
    return digest.hexdigest()


def path_of(name: str) -> Path:
    """The file of a record."""
    return FOLDER / f"{name}.json.gz"


def read(name: str) -> dict[str, Any]:
    """A whole record: ``made_with`` and ``answers``."""
    with gzip.open(path_of(name), "rt", encoding="utf-8") as file:
        record: dict[str, Any] = json.load(file)
    return record


def write(name: str, answers: object) -> int:
    """Record answers; the file's size.  Equal answers give equal files."""
    made_with = {
        "weights_sha256": weights_hash(),
        "transformers": version("transformers"),
        "torch": version("torch"),
    }
    text = json.dumps({"made_with": made_with, "answers": answers}, separators=(",", ":"))
    path = path_of(name)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return path.stat().st_size

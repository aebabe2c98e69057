"""What the probe of a model found, kept for the next start: half a second of it.

A file in the cache directory holds the last result of `pagedserve.models.probe` for one model, and
all that it depends on: the files of the model and of this package, by size and time of change, the
versions of torch and transformers, and how the model runs.

Invariants:

1. Only results of models that passed are kept: what was refused is probed again.
2. A file that is about anything else, or cannot be read or written, is as good as none.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from pagedserve.cache.engine import LayerShape
from pagedserve.models.convert import cache_directory
from pagedserve.models.probe import AttentionProfile

_OWN_FILES = Path(__file__).parents[1]
# In a checkout kernels is a link, which the first pattern does not follow.
_OWN_PATTERNS = ("**/*.py", "kernels/*.py", "_core*")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result for one model, wherever it is kept.

    Attributes:
        file: where.
        depends_on: what it depends on, for people and to be compared.
    """

    file: Path
    depends_on: list[str]

    @classmethod
    def of(cls, model: Path, *how: object) -> "ProbeResult":
        """The result for a model.

        Args:
            model: its directory.
            *how: what else it depends on: dtype, device, kernel and so on.
        """
        name = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:32]
        depends_on = [
            f"transformers {transformers.__version__}",
            f"torch {torch.__version__}",
            *_stamps(path for path in model.iterdir() if path.is_file()),
            *_stamps(file for pattern in _OWN_PATTERNS for file in _OWN_FILES.glob(pattern)),
            *map(str, how),
        ]
        return cls(cache_directory() / "probed" / f"{name}.json", depends_on)

    def recall(self) -> AttentionProfile | None:
        """What was kept; None if nothing, or of something else."""
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            if found["depends_on"] != self.depends_on:
                return None
            layers = tuple(LayerShape(**layer) for layer in found["layers"])
            return AttentionProfile(layers, int(found["max_exact_len"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep(self, profile: AttentionProfile) -> None:
        """Keep it; the file is whole or not there."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, work = tempfile.mkstemp(prefix=".writing-", dir=self.file.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as opened:
                json.dump({"depends_on": self.depends_on, **asdict(profile)}, opened)
            Path(work).replace(self.file)
        except OSError:
            return


def _stamps(files: Iterable[Path]) -> list[str]:
    """Files by path, size and time of change."""
    stamps = []
    for path in sorted(set(files)):
        status = path.stat()
        stamps.append(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}")
    return stamps

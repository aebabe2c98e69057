"""Cached results of the probe: this saves half a second of each start.

A file in the cache directory stores the last result of `pagedserve.models.check.probe` for one
model, with everything that it depends on: the files of the model and of this package, by size and
time of modification, the versions of torch and transformers, and how the model runs.

Invariants:

1. Only models that passed are cached: a refused one is probed again.
2. A file for something else, or one that cannot be read or written, counts as missing.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch
import transformers

from pagedserve.cache.layers import LayerShape
from pagedserve.cache.states import StateShape
from pagedserve.models.check.probe import ProbeResult
from pagedserve.models.load.convert import cache_directory

_PACKAGE = Path(__file__).parents[2]
# In a checkout kernels is a symlink, which the first pattern does not follow.
_PACKAGE_PATTERNS = ("**/*.py", "kernels/*.py", "_core.*")


@dataclass(frozen=True, slots=True)
class ProbeCacheEntry:
    """Cache entry of one model's result.

    Attributes:
        file: file with the result.
        depends_on: everything that the result depends on, as readable text to be compared.
    """

    file: Path
    depends_on: list[str]

    @classmethod
    def of(cls, model: Path, *how: object) -> "ProbeCacheEntry":
        """Create the entry of a model.

        Args:
            model: directory of the model.
            *how: further dependencies of the result: dtype, device, kernel and so on.
        """
        name = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:32]
        depends_on = [
            f"transformers {transformers.__version__}",
            f"torch {torch.__version__}",
            *_stamps(path for path in model.iterdir() if path.is_file()),
            *_package_stamps(_PACKAGE),
            *map(str, how),
        ]
        return cls(cache_directory() / "probed" / f"{name}.json", depends_on)

    def load(self) -> ProbeResult | None:
        """Load the result; None if there is none, or it is for something else."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            if content["depends_on"] != self.depends_on:
                return None
            layers = tuple(LayerShape(**layer) for layer in content["layers"])
            found = {field.name: content[field.name] for field in fields(ProbeResult)}
            states = tuple(
                tuple(StateShape(**state | {"shape": tuple(state["shape"])}) for state in kept)
                for kept in content["states"]
            )
            lists = {"layers": layers, "modules": tuple(content["modules"]), "states": states}
            return ProbeResult(**(found | lists))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, result: ProbeResult) -> None:
        """Save a result atomically."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, work = tempfile.mkstemp(prefix=".writing-", dir=self.file.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as opened:
                json.dump({"depends_on": self.depends_on, **asdict(result)}, opened)
            Path(work).replace(self.file)
        except OSError:
            return


@cache
def _package_stamps(package: Path) -> list[str]:
    """Stamps of the package: its code stays what it was when it was imported."""
    return _stamps(file for pattern in _PACKAGE_PATTERNS for file in package.glob(pattern))


def _stamps(files: Iterable[Path]) -> list[str]:
    """Files by path, size and time of modification; one that was deleted since is skipped."""
    stamps = []
    for path in sorted(set(files)):
        with suppress(FileNotFoundError):
            status = path.stat()
            stamps.append(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}")
    return stamps

"""Adapters in host memory: an LRU cache, and those in use.

Invariants:

1. An ordinal identifies the contents of files: equal contents share one, others never get it.
2. Weights stay in memory while their ``HostAdapter`` is referenced; additionally those of the
   ``max_cpu_loras`` most recently used.

Thread-safe; the calling thread reads the files, so it must not be called in a step.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from pagedserve.errors import StepError
from pagedserve.lora.adapter import CONFIG, WEIGHTS, AdapterFiles, Shapes
from pagedserve.lora.weights import LoraWeights
from pagedserve.regular_files import MAX_SAFETENSORS_HEADER_BYTES

# Two writes within this many seconds may leave the same timestamp.
_SETTLING_SECONDS: Final = 2.0

# Inode, size and timestamp of each of the files.
_Stamp: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class HostAdapter:
    """An adapter whose weights are in host memory.

    Attributes:
        ordinal: Number of its contents, from 1 on.
        weights: Weights by the names of the model's modules.
    """

    ordinal: int
    weights: Mapping[str, LoraWeights]


class HostAdapters:
    """Loads adapters and caches the most recently used."""

    def __init__(self, shapes: Shapes, *, max_rank: int, max_cpu_loras: int) -> None:
        """Start empty.

        Args:
            shapes: Sizes of the model's modules.
            max_rank: Maximum rank.
            max_cpu_loras: Maximum number of cached adapters that are not in use.
        """
        self._shapes = shapes
        self._max_rank = max_rank
        self._max_cpu_loras = max_cpu_loras
        # A low-rank change has no more numbers than the weight, at most eight bytes each.
        num_weights = sum(num_in * num_out for num_in, num_out in shapes.values())
        self._max_bytes = MAX_SAFETENSORS_HEADER_BYTES + 8 * num_weights
        self._lock = Lock()
        self._ordinals: dict[bytes, int] = {}
        # Digests of files that have not been modified since.
        self._seen: dict[Path, tuple[_Stamp, bytes]] = {}
        self._held: WeakValueDictionary[int, HostAdapter] = WeakValueDictionary()
        self._kept: OrderedDict[int, HostAdapter] = OrderedDict()

    def load(self, name: str, path: str) -> HostAdapter:
        """Return the adapter of a directory, reading it if its files have changed.

        Raises:
            RequestError: Its files are invalid; the message lists what is accepted.
        """
        directory = Path(path)
        with self._lock:
            stamp = _stamp(directory)
            seen, digest = self._seen.get(directory, (None, b""))
            adapter = None
            if stamp is not None and seen == stamp:
                adapter = self._held.get(self._ordinals[digest])
            if adapter is None:
                adapter = self._read(name, directory, stamp)
            self._keep(adapter)
            return adapter

    def weights(self, ordinal: int) -> Mapping[str, LoraWeights]:
        """Weights of an adapter in use.

        Raises:
            StepError: It is not in use.
        """
        adapter = self._held.get(ordinal)
        if adapter is None:
            raise StepError(f"adapter {ordinal} is not in host memory: its requests hold it")
        return adapter.weights

    def drop(self, ordinal: int) -> None:
        """Remove an adapter from the cache; it stays in memory while in use."""
        with self._lock:
            self._kept.pop(ordinal, None)

    def _read(self, name: str, directory: Path, stamp: _Stamp | None) -> HostAdapter:
        began = time.time()
        files = AdapterFiles.read(name, str(directory), self._max_bytes)
        digest = files.digest
        adapter = self._held.get(self._ordinals.get(digest, 0))
        if adapter is None:
            weights = files.parse(self._shapes, self._max_rank)
            ordinal = self._ordinals.setdefault(digest, len(self._ordinals) + 1)
            adapter = self._held[ordinal] = HostAdapter(ordinal, weights)
        self._seen.pop(directory, None)
        if stamp is not None and _is_settled(stamp, began):
            self._seen[directory] = (stamp, digest)
        return adapter

    def _keep(self, adapter: HostAdapter) -> None:
        self._kept[adapter.ordinal] = adapter
        self._kept.move_to_end(adapter.ordinal)
        while len(self._kept) > self._max_cpu_loras:
            self._kept.popitem(last=False)


def _stamp(directory: Path) -> _Stamp | None:
    """A value that changes when the files do; None if they do not exist."""
    try:
        found = [(directory / name).stat() for name in (CONFIG, WEIGHTS)]
    except (OSError, ValueError):
        return None
    return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in found)


def _is_settled(stamp: _Stamp, now: float) -> bool:
    """Whether a later write would be visible: not within the same tick of the file system."""
    return all(now - time_ns / 1e9 > _SETTLING_SECONDS for _, _, time_ns in stamp)

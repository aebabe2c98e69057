"""The adapters in host memory: those that were used last, and those that somebody holds.

Invariants:

1. An ordinal stands for the contents of files: equal contents have one, others never get it.
2. Weights are here as long as somebody holds their ``HostAdapter``; besides, those of the
   ``max_cpu_loras`` that were asked for last.

Any thread may ask; files are read by whoever asks, so nobody asks in a step.
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

# Two writes within so many seconds may leave the same time behind.
_SETTLING_SECONDS: Final = 2.0

# Inode, size and time of each of the files.
_Stamp: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class HostAdapter:
    """An adapter whose weights are in host memory.

    Attributes:
        ordinal: Of its contents, from 1 on.
        weights: By the names of the model's modules.
    """

    ordinal: int
    weights: Mapping[str, LoraWeights]


class HostAdapters:
    """Reads adapters and keeps some."""

    def __init__(self, shapes: Shapes, *, max_rank: int, max_cpu_loras: int) -> None:
        """Begin with none.

        Args:
            shapes: Of the model's modules.
            max_rank: The largest rank that there is room for.
            max_cpu_loras: Adapters that are kept though nobody holds them.
        """
        self._shapes = shapes
        self._max_rank = max_rank
        self._max_cpu_loras = max_cpu_loras
        self._lock = Lock()
        self._ordinals: dict[bytes, int] = {}
        # The contents of files that have not been touched since.
        self._seen: dict[Path, tuple[_Stamp, bytes]] = {}
        self._held: WeakValueDictionary[int, HostAdapter] = WeakValueDictionary()
        self._kept: OrderedDict[int, HostAdapter] = OrderedDict()

    def load(self, name: str, path: str) -> HostAdapter:
        """The adapter of a directory, read if it is not here as its files are now.

        Raises:
            RequestError: What is wrong with its files, and what is accepted.
        """
        directory = Path(path).expanduser()
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
        """The weights of an adapter that somebody holds.

        Raises:
            StepError: Nobody does.
        """
        adapter = self._held.get(ordinal)
        if adapter is None:
            raise StepError(f"adapter {ordinal} is not in host memory: its requests hold it")
        return adapter.weights

    def drop(self, ordinal: int) -> None:
        """Keep an adapter no longer than somebody holds it."""
        with self._lock:
            self._kept.pop(ordinal, None)

    def _read(self, name: str, directory: Path, stamp: _Stamp | None) -> HostAdapter:
        began = time.time()
        files = AdapterFiles.read(name, str(directory))
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
    """What changes when the files do; None where there are none."""
    try:
        found = [(directory / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError:
        return None
    return tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in found)


def _is_settled(stamp: _Stamp, now: float) -> bool:
    """Whether a later write would show: not within the same tick of the file system's clock."""
    return all(now - time_ns / 1e9 > _SETTLING_SECONDS for _, _, time_ns in stamp)

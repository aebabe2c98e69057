"""The adapters that requests name: which directory each number stands for."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from pagedserve.engine.request import Request
from pagedserve.engine.stats import LoraUsage
from pagedserve.errors import ModelLoadError, RequestError
from pagedserve.executor.protocol import Adapter, Executor
from pagedserve.lora.request import LoRARequest, check_lora_request
from pagedserve.models.hub import HubOptions
from pagedserve.models.registry import resolve_adapter


class KnownAdapter(NamedTuple):
    """What a number stands for: a directory or hub id, and what was in it when last asked for."""

    path: str
    ordinal: int


@dataclass(slots=True)
class AdapterTable:
    """Finds adapters by their numbers; any thread may ask, beside a step.

    Attributes:
        executor: Has their weights.
        max_loras: Adapters of a step; 0 where the engine takes none.
        hub: How hubs' repositories are fetched.
    """

    executor: Executor
    max_loras: int
    hub: HubOptions = field(default_factory=HubOptions)
    _known: dict[int, KnownAdapter] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def ids(self) -> set[int]:
        """The numbers that stand for something."""
        return set(self._known)

    def load(self, lora_request: LoRARequest) -> Adapter:
        """An adapter as its files are now; they are fetched and read here if need be.

        Raises:
            RequestError: The engine takes none, the number stands for another adapter, what is
                wrong with the files, or with the hub.
        """
        check_lora_request("lora_request", lora_request)
        if not self.max_loras:
            raise RequestError(
                f"adapter {lora_request.lora_name!r}: the engine takes adapters with "
                "enable_lora=True alone",
                param="lora_request",
            )
        number, path = lora_request.lora_int_id, lora_request.lora_path
        directory = self._directory(path)  # who waits for a hub holds nobody up
        with self._lock:
            known = self._known.get(number)
            if known is not None and known.path != path and not lora_request.load_inplace:
                raise RequestError(
                    f"lora_int_id is {number} of {path!r}; it stands for {known.path!r}: give "
                    "each adapter a number of its own",
                    param="lora_request",
                )
            adapter = self.executor.load_adapter(lora_request.lora_name, directory)
            self._known[number] = KnownAdapter(path, adapter.ordinal)
        return adapter

    def _directory(self, path: str) -> str:
        try:
            return str(resolve_adapter(path, self.hub))
        except ModelLoadError as error:
            raise RequestError(str(error), param="lora_request") from error

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; requests that have it end with it.

        Returns:
            Whether there was one of that number.
        """
        with self._lock:
            known = self._known.pop(lora_int_id, None)
        if known is not None:
            self.executor.drop_adapter(known.ordinal)
        return known is not None

    def usage(self, requests: Iterable[Request]) -> LoraUsage | None:
        """Which adapters unfinished requests have; None where the engine takes none."""
        if not self.max_loras:
            return None
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for request in list(requests):  # in one go: a step may be changing them
            if request.lora_request is not None:
                is_running = request.metrics.first_scheduled_time is not None
                names[is_running].add(request.lora_request.lora_name)
        return LoraUsage(self.max_loras, tuple(sorted(names[True])), tuple(sorted(names[False])))

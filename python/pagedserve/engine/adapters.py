"""LoRA adapters of requests, loaded by their ids."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from pagedserve.engine.request import Request
from pagedserve.engine.stats import LoraUsage
from pagedserve.errors import ModelLoadError, RequestError
from pagedserve.executor.protocol import Adapter, Executor
from pagedserve.lora.request import LoRARequest, check_lora_request
from pagedserve.models.load.hub import HubOptions
from pagedserve.models.load.sources import resolve_adapter


class KnownAdapter(NamedTuple):
    """Directory or hub id of an adapter id, with the adapter that was last loaded from it."""

    path: str
    ordinal: int


@dataclass(slots=True)
class AdapterTable:
    """Loads adapters by id; thread-safe, and callable during a step.

    Attributes:
        executor: Holds the weights.
        max_loras: Maximum adapters per step; 0 if the engine does not accept adapters.
        hub: Options for downloads from hubs.
    """

    executor: Executor
    max_loras: int
    hub: HubOptions = field(default_factory=HubOptions)
    _known: dict[int, KnownAdapter] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def ids(self) -> set[int]:
        """Ids of the known adapters."""
        return set(self._known)

    def load(self, lora_request: LoRARequest) -> Adapter:
        """Load an adapter from its files, downloading and reading them if they changed.

        Raises:
            RequestError: Adapters are disabled, the id belongs to another adapter, or the files or
                the download are faulty.
        """
        check_lora_request("lora_request", lora_request)
        if not self.max_loras:
            raise RequestError(
                f"adapter {lora_request.lora_name!r}: the engine takes adapters with "
                "enable_lora=True alone",
                param="lora_request",
            )
        number, path = lora_request.lora_int_id, lora_request.lora_path
        directory = self._directory(path)  # outside the lock: a download blocks no other request
        with self._lock:
            known = self._known.get(number)
            if known is not None and known.path != path and not lora_request.load_inplace:
                raise RequestError(
                    f"lora_int_id is {number} of {path!r}; it stands for {known.path!r}: give "
                    "each adapter a different number",
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
        """Remove an adapter; running requests keep it until they end.

        Returns:
            Whether the id was known.
        """
        with self._lock:
            known = self._known.pop(lora_int_id, None)
        if known is not None:
            self.executor.drop_adapter(known.ordinal)
        return known is not None

    def usage(self, requests: Iterable[Request]) -> LoraUsage | None:
        """Adapters of unfinished requests; None if the engine does not accept adapters."""
        if not self.max_loras:
            return None
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for request in list(requests):  # copied at once: a step may be changing them
            if request.lora_request is not None:
                is_running = request.metrics.first_scheduled_time is not None
                names[is_running].add(request.lora_request.lora_name)
        return LoraUsage(self.max_loras, tuple(sorted(names[True])), tuple(sorted(names[False])))

"""LoRA adapters that a server serves, each under a model name."""

import asyncio
import itertools
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagedserve.engine.client import EngineClient
from pagedserve.lora.request import LoRARequest
from pagedserve.server.http.errors import ServerError
from pagedserve.server.options import ADAPTER_NAME, LoraModule, is_adapter_name


@dataclass(slots=True)
class ServedAdapters:
    """Adapters by name; each load gets a new id in the engine.

    Attributes:
        client: The engine.
        base_names: Names of the model, which no adapter may have.
    """

    client: EngineClient
    base_names: tuple[str, ...]
    _by_name: dict[str, LoRARequest] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def names(self) -> list[str]:
        """Names of the adapters, in the order in which they were loaded."""
        return list(self._by_name)

    def get(self, name: str) -> LoRARequest | None:
        """The adapter of that name, or None."""
        return self._by_name.get(name)

    async def load(self, module: LoraModule, *, load_inplace: bool = False) -> None:
        """Load an adapter and serve it under a name.

        Args:
            module: Name and path of the adapter.
            load_inplace: Replace the adapter of that name, if it exists.

        Raises:
            ServerError: 400, the name is taken or invalid.
            RequestError: The adapter is invalid.
        """
        if not is_adapter_name(module.name):
            text = f"lora_name is {reprlib.repr(module.name)}; it must have {ADAPTER_NAME}"
            raise ServerError(400, text, param="lora_name")
        async with self._lock:
            before = self._by_name.get(module.name)
            if module.name in self.base_names:
                text = f"The model itself is called '{module.name}'."
                raise ServerError(400, text, param="lora_name")
            if before is not None and not load_inplace:
                text = f"The lora adapter '{module.name}' has already been loaded."
                raise ServerError(400, text, param="lora_name")
            lora_request = LoRARequest(
                module.name,
                next(self._numbers),
                module.path,
                base_model_name=module.base_model_name,
            )
            await self.client.add_lora(lora_request)
            self._by_name[module.name] = lora_request
            if before is not None:
                await self.client.remove_lora(before.lora_int_id)

    async def unload(self, name: str, lora_int_id: int | None = None) -> None:
        """Stop serving an adapter; running requests keep it until they end.

        Raises:
            ServerError: 404, the name is unknown, or has another id.
        """
        async with self._lock:
            lora_request = self._by_name.get(name)
            if lora_request is None or lora_int_id not in (None, lora_request.lora_int_id):
                text = f"The lora adapter '{name}' cannot be found."
                raise ServerError(404, text, param="lora_name")
            del self._by_name[name]
            await self.client.remove_lora(lora_request.lora_int_id)

"""The adapters that a server answers with, each under a name as if it were a model."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagedserve.engine.client import EngineClient
from pagedserve.lora.request import LoRARequest
from pagedserve.server.errors import ServerError
from pagedserve.server.options import LoraModule


@dataclass(slots=True)
class ServedAdapters:
    """Adapters by name; each load has a number of its own in the engine.

    Attributes:
        client: The engine.
        base_names: Of the model, which no adapter can have.
    """

    client: EngineClient
    base_names: tuple[str, ...]
    _by_name: dict[str, LoRARequest] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def names(self) -> list[str]:
        """In the order in which they were loaded."""
        return list(self._by_name)

    def get(self, name: str) -> LoRARequest | None:
        """The adapter of that name, if there is one."""
        return self._by_name.get(name)

    async def load(self, module: LoraModule, *, load_inplace: bool = False) -> None:
        """Answer with an adapter under a name.

        Args:
            module: The name, and where its files are.
            load_inplace: Take the place of the adapter of that name, if there is one.

        Raises:
            ServerError: 400, the name is taken.
            RequestError: What is wrong with the adapter.
        """
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
        """Take no more requests for an adapter; those that run end with it.

        Raises:
            ServerError: 404, there is none of that name, or not of that number.
        """
        async with self._lock:
            lora_request = self._by_name.get(name)
            if lora_request is None or lora_int_id not in (None, lora_request.lora_int_id):
                text = f"The lora adapter '{name}' cannot be found."
                raise ServerError(404, text, param="lora_name")
            del self._by_name[name]
            await self.client.remove_lora(lora_request.lora_int_id)

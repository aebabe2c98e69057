"""Responses that later requests may name, they or their items, in bounded memory.

Entries are JSON, so that their size is that of their bytes.  The least recently used are dropped
first.  Each belongs to the API key of its request, and does not exist for any other key.

Invariant: a response is in progress or stored, never both: a client that has it may delete it.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pagedserve.server.http.errors import ServerError
from pagedserve.server.responses.items import ITEMS, Item

# Digest of an API key, and the id of a response.
Key: TypeAlias = tuple[bytes, str]
# Bytes of an entry beside its JSON: objects and dictionary slots.
_ENTRY_BYTES: Final = 1024
# Bytes of the id of an item, and of its entry in the index.
_ITEM_BYTES: Final = 320


@dataclass(frozen=True, slots=True)
class Stored:
    """A response with its input.

    Attributes:
        response: JSON of the response.
        input_items: JSON of the items of its request.
        previous_id: Id of the response that it continues; None for none.
        item_ids: Ids of the items of its request, and of its output.
    """

    response: bytes
    input_items: bytes
    previous_id: str | None
    item_ids: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that it counts for."""
        num_bytes = len(self.response) + len(self.input_items) + _ENTRY_BYTES
        return num_bytes + len(self.item_ids) * _ITEM_BYTES

    def input(self) -> list[Item]:
        """Items of its request."""
        return ITEMS.validate_python(json.loads(self.input_items))

    def turn(self) -> list[Item]:
        """Items of its request, and of its output."""
        output = json.loads(self.response)["output"]
        return [*self.input(), *ITEMS.validate_python(output)]


@dataclass(slots=True)
class ResponseStore:
    """Stored responses, and those in progress that will be stored.

    Attributes:
        max_bytes: Maximum bytes of all stored responses.
        num_bytes: Bytes of all stored responses.
        running: State of each response in progress, as its JSON object.
    """

    max_bytes: int
    num_bytes: int = 0
    running: dict[Key, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    _stored: OrderedDict[Key, Stored] = field(default_factory=OrderedDict)
    # Responses with an item, the last of them last, by the owner and the id of the item.
    _with_item: dict[Key, dict[Key, None]] = field(default_factory=dict)

    def put(self, key: Key, stored: Stored) -> None:
        """Store a response, which has ended; drop the least recently used ones beyond the bound."""
        self.running.pop(key, None)
        if stored.num_bytes > self.max_bytes:
            return
        self._stored[key] = stored
        for item_key in _item_keys(key, stored):
            self._with_item.setdefault(item_key, {})[key] = None
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, key: Key, *, named_by: str = "response_id") -> Stored:
        """Return a stored response.

        Args:
            key: Owner and id.
            named_by: Field that names it.

        Raises:
            ServerError: 404, it is not stored.
        """
        if key not in self._stored:
            raise _unknown(f"response {key[1]!r:.300}", named_by)
        self._stored.move_to_end(key)
        return self._stored[key]

    def delete(self, key: Key) -> None:
        """Delete a stored response.

        Raises:
            ServerError: 404, it is not stored.
        """
        if key not in self._stored:
            raise _unknown(f"response {key[1]!r:.300}", "response_id")
        self._drop(key)

    def _drop(self, key: Key) -> None:
        stored = self._stored.pop(key)
        self.num_bytes -= stored.num_bytes
        for item_key in _item_keys(key, stored):
            self._with_item[item_key].pop(key, None)
            if not self._with_item[item_key]:
                del self._with_item[item_key]

    def with_items(self, owner: bytes, item_ids: Iterable[str]) -> dict[str, Stored]:
        """Return the last response that has each item, by the item's id.

        Raises:
            ServerError: 404, one of the items is not stored.
        """
        found = {}
        for item_id in item_ids:
            if (keys := self._with_item.get((owner, item_id))) is None:
                raise _unknown(f"item {item_id!r:.300}", "input")
            found[item_id] = self.get(next(reversed(keys)))
        return found

    def conversation(self, key: Key, *, named_by: str = "previous_response_id") -> list[Stored]:
        """Return a response and those that it continues, oldest first.

        Raises:
            ServerError: 404, one of them is not stored.
        """
        owner, found = key[0], [self.get(key, named_by=named_by)]
        while (previous_id := found[-1].previous_id) is not None:
            found.append(self.get((owner, previous_id), named_by=named_by))
        return found[::-1]


def _item_keys(key: Key, stored: Stored) -> set[Key]:
    """Owner and id of each item of a response."""
    return {(key[0], item_id) for item_id in stored.item_ids}


def _unknown(what: str, named_by: str) -> ServerError:
    return ServerError(
        404,
        f"no {what} is stored: it was deleted, dropped for later ones "
        "(--max-stored-response-bytes), sent with store false, or never made for this API key",
        param=named_by,
    )

"""Responses that later requests may name, in bounded memory.

Entries are JSON, so that their size is that of their bytes.  The least recently used are dropped
first.  Each belongs to the API key of its request, and does not exist for any other key.

Invariant: a response is in progress or stored, never both: a client that has it may delete it.
"""

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pagedserve.server.http.errors import ServerError
from pagedserve.server.responses.items import ITEMS, Item

# Digest of an API key, and the id of a response.
Key: TypeAlias = tuple[bytes, str]
# Bytes of an entry beside its JSON: objects and dictionary slots.
_ENTRY_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Stored:
    """A response with its input.

    Attributes:
        response: JSON of the response.
        input_items: JSON of the items of its request.
        previous_id: Id of the response that it continues; None for none.
    """

    response: bytes
    input_items: bytes
    previous_id: str | None

    @property
    def num_bytes(self) -> int:
        """Bytes that it counts for."""
        return len(self.response) + len(self.input_items) + _ENTRY_BYTES

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

    def put(self, key: Key, stored: Stored) -> None:
        """Store a response, which has ended; drop the least recently used ones beyond the bound."""
        self.running.pop(key, None)
        self._stored[key] = stored
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self.max_bytes:
            _, dropped = self._stored.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def get(self, key: Key, *, named_by: str = "response_id") -> Stored:
        """Return a stored response.

        Args:
            key: Owner and id.
            named_by: Field that names it.

        Raises:
            ServerError: 404, it is not stored.
        """
        if key not in self._stored:
            raise _unknown(key[1], named_by)
        self._stored.move_to_end(key)
        return self._stored[key]

    def delete(self, key: Key) -> None:
        """Delete a stored response.

        Raises:
            ServerError: 404, it is not stored.
        """
        if key not in self._stored:
            raise _unknown(key[1], "response_id")
        self.num_bytes -= self._stored.pop(key).num_bytes

    def conversation(self, key: Key, *, named_by: str = "previous_response_id") -> list[Stored]:
        """Return a response and those that it continues, oldest first.

        Raises:
            ServerError: 404, one of them is not stored.
        """
        owner, found = key[0], [self.get(key, named_by=named_by)]
        while (previous_id := found[-1].previous_id) is not None:
            found.append(self.get((owner, previous_id), named_by=named_by))
        return found[::-1]


def _unknown(response_id: str, named_by: str) -> ServerError:
    return ServerError(
        404,
        f"no response {response_id!r:.300} is stored: it was deleted, dropped for later ones "
        "(--max-stored-response-bytes), sent with store false, or never made for this API key",
        param=named_by,
    )

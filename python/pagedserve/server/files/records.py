"""Objects that belong to API keys, a JSON file each in a directory.

Invariants:

1. An object does not exist for any API key but its owner's.
2. A file is replaced by a whole one, so that a process that is killed leaves none incomplete.
3. Lists are in the order of creation; paths are made from ids that a server has made.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from pagedserve.errors import ConfigError
from pagedserve.server.http.errors import ServerError

# Suffix of files that are being written.
_PARTIAL: Final = ".partial"


class Record(BaseModel):
    """An object with an id, and the time of its creation in Unix seconds."""

    id: str
    created_at: int


T = TypeVar("T", bound=Record)


class Page(NamedTuple):
    """The part of a list that a client requests.

    Attributes:
        after: Id of the last object of the page before; None for the first page.
        limit: Maximum number of objects.
        order: Whether the oldest comes first, "asc", or the newest.
    """

    after: str | None
    limit: int
    order: Literal["asc", "desc"]


def new_id(prefix: str) -> str:
    """Create an id that sorts after earlier ones of this prefix and is not predictable."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is whole whenever it exists.

    Raises:
        OSError: It cannot be written; the file is as before.
    """
    partial = path.with_name(path.name + _PARTIAL)
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


class Records(Generic[T]):
    """All objects of a kind, in memory and in a directory."""

    def __init__(self, directory: Path, kind: type[T], name: str) -> None:
        """Create the directory, or read what is in it.

        Args:
            directory: Directory of their files.
            kind: Type of the objects.
            name: Name of the kind, for messages.

        Raises:
            ConfigError: It cannot be created or read, or has a damaged file.
        """
        self._directory = directory
        self._kind = kind
        self._name = name
        # Owner and object by id.
        self._records: dict[str, tuple[bytes, T]] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.glob(f"*{_PARTIAL}"):
                path.unlink()
            for path in directory.glob("*.json"):
                self._read(path)
        except OSError as error:
            raise ConfigError(
                f"batch_directory: cannot use {directory}: {error.strerror}"
            ) from error

    def _read(self, path: Path) -> None:
        try:
            stored = json.loads(path.read_bytes())
            record = self._kind.model_validate(stored["record"])
            self._records[record.id] = bytes.fromhex(stored["owner"]), record
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise ConfigError(
                f"batch_directory: {path} is none of a {self._name}; restore or delete it"
            ) from error

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[tuple[bytes, T]]:
        """Owners and objects, oldest first."""
        found = self._records.values()
        return iter(sorted(found, key=lambda stored: (stored[1].created_at, stored[1].id)))

    def put(self, owner: bytes, record: T, **changes: Any) -> None:
        """Store an object, or its new state.

        Args:
            owner: Digest of the API key.
            record: The object.
            **changes: New values of fields, which it has once they are stored.

        Raises:
            OSError: It cannot be written.
        """
        stored = {"owner": owner.hex(), "record": record.model_dump() | changes}
        replace_file(self._path(record.id), json.dumps(stored).encode())
        for name, value in changes.items():
            setattr(record, name, value)
        self._records[record.id] = owner, record

    def get(self, owner: bytes, record_id: str, *, param: str) -> T:
        """Return an object of an API key.

        Args:
            owner: Digest of the key.
            record_id: Id that a client gave.
            param: Field that has the id.

        Raises:
            ServerError: 404, there is none.
        """
        found = self._records.get(record_id)
        if found is None or found[0] != owner:
            text = f"no {self._name} {record_id!r:.300} exists for this API key"
            raise ServerError(404, text, param=param)
        return found[1]

    def delete(self, record: T) -> None:
        """Delete an object.

        Raises:
            OSError: Its file cannot be deleted.
        """
        self._path(record.id).unlink(missing_ok=True)
        del self._records[record.id]

    def page(
        self, owner: bytes, page: Page, is_shown: Callable[[T], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Return a page of the objects of an API key, as a list of OpenAI's.

        Raises:
            ServerError: 400, ``after`` is not the id of such an object.
        """
        found = [record for each, record in self if each == owner and is_shown(record)]
        if page.order == "desc":
            found.reverse()
        ids = [record.id for record in found]
        if page.after is not None and page.after not in ids:
            text = f"after is {page.after!r:.300}, which is no {self._name} of this list"
            raise ServerError(400, text, param="after")
        start = 0 if page.after is None else ids.index(page.after) + 1
        shown = found[start : start + page.limit]
        return {
            "object": "list",
            "data": [record.model_dump() for record in shown],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": start + page.limit < len(found),
        }

    def _path(self, record_id: str) -> Path:
        return self._directory / f"{record_id}.json"

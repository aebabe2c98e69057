"""Contents of files in a directory, within a bound of their number and total size."""

import logging
import math
import shutil
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, Literal

from pagedserve.server.files.protocol import FileObject
from pagedserve.server.files.records import Page, Records, new_id
from pagedserve.server.files.thread import to_end
from pagedserve.server.http.errors import ServerError

# Files of all API keys; outputs of batches are stored beyond it.
MAX_FILES: Final = 10_000
MAX_FILENAME_CHARS: Final = 256
_SUFFIX: Final = ".content"
# Expired files that are deleted at a time.
_MAX_DROPPED: Final = 20

logger = logging.getLogger(__name__)


class FileStore:
    """Files of all API keys.

    Attributes:
        records: Their objects.
        max_bytes: Maximum total size of the contents.
        num_bytes: Total size of the contents, with those that are being stored.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Create the directory, or read what is in it.

        Raises:
            ConfigError: It cannot be created or read, or has a damaged file.
        """
        self._directory = directory
        self.records = Records(directory, FileObject, "file")
        self.max_bytes = max_bytes
        self._drop_halves()
        self.num_bytes = sum(file.bytes for _, file in self.records)

    def _drop_halves(self) -> None:
        """Drop contents without an object, and objects without their content."""
        known = {file.id for _, file in self.records}
        for path in self._directory.glob(f"*{_SUFFIX}"):
            if path.name.removesuffix(_SUFFIX) not in known:
                path.unlink()
        for _, file in self.records:
            if not self.path(file.id).exists():
                self.records.delete(file)

    def path(self, file_id: str) -> Path:
        """Path of the content of a file that exists."""
        return self._directory / f"{file_id}{_SUFFIX}"

    async def upload(
        self,
        owner: bytes,
        content: BinaryIO,
        *,
        num_bytes: int,
        filename: str,
        lifetime: int | None,
    ) -> FileObject:
        """Store a file of a client.

        Args:
            owner: Digest of the API key.
            content: Content, from its current position on.
            num_bytes: Size of the content.
            filename: Name that the client gave.
            lifetime: Seconds until it is deleted; None keeps it.

        Raises:
            ServerError: 400, the bounds do not allow it.
            OSError: It cannot be written.
        """
        self.check_count()
        self.check_bytes(num_bytes)
        if len(filename) > MAX_FILENAME_CHARS:
            text = f"the filename has {len(filename)} characters; at most {MAX_FILENAME_CHARS}"
            raise ServerError(400, f"{text} are accepted", param="file")
        file_id = new_id("file-")
        self.num_bytes += num_bytes
        try:
            await to_end(partial(_copy, content, self.path(file_id)))
            return self._add(
                owner, file_id, num_bytes, filename, purpose="batch", lifetime=lifetime
            )
        except BaseException:
            self.num_bytes -= num_bytes
            self.path(file_id).unlink(missing_ok=True)
            raise

    def check_count(self) -> None:
        """Check that one more file, or the output of one more batch, is within the bound.

        Raises:
            ServerError: 400, it is not.
        """
        if len(self.records) >= MAX_FILES:
            text = f"{len(self.records)} files are stored; at most {MAX_FILES} are accepted"
            raise ServerError(400, f"{text}: delete some first")

    def check_bytes(self, num_bytes: int) -> None:
        """Check that `num_bytes` more bytes are within the bound.

        Raises:
            ServerError: 400, they are not.
        """
        if self.num_bytes + num_bytes > self.max_bytes:
            raise ServerError(
                400,
                f"the stored files would have {self.num_bytes + num_bytes} bytes; at most "
                f"{self.max_bytes} are accepted (--max-batch-directory-bytes): delete some first",
            )

    def add_output(self, owner: bytes, file_id: str, filename: str, lifetime: int | None) -> bool:
        """Store the output of a batch, whose content is at ``path``, also if it is stored already.

        Args:
            owner: Digest of the API key.
            file_id: Id of the file.
            filename: Name of the file.
            lifetime: As of ``upload``.

        Returns:
            Whether it was stored: an empty one is deleted.

        Raises:
            OSError: It cannot be read or written.
        """
        num_bytes = self.path(file_id).stat().st_size
        if not num_bytes:
            self.path(file_id).unlink()
            return False
        num_before = sum(file.bytes for _, file in self.records if file.id == file_id)
        self._add(owner, file_id, num_bytes, filename, purpose="batch_output", lifetime=lifetime)
        self.num_bytes += num_bytes - num_before
        return True

    def _add(
        self,
        owner: bytes,
        file_id: str,
        num_bytes: int,
        filename: str,
        *,
        purpose: Literal["batch", "batch_output"],
        lifetime: int | None,
    ) -> FileObject:
        now = int(time.time())
        file = FileObject(
            id=file_id,
            bytes=num_bytes,
            created_at=now,
            filename=filename,
            purpose=purpose,
            expires_at=None if lifetime is None else now + lifetime,
        )
        self.records.put(owner, file)
        return file

    def drop_expired(self, check_unused: Callable[[FileObject], None]) -> None:
        """Delete expired files, at most `_MAX_DROPPED`, as the caller waits.

        Args:
            check_unused: Raises ``ServerError`` if a file is in use, which is then kept.
        """
        now = time.time()
        expired = (file for _, file in self.records if now >= (file.expires_at or math.inf))
        for file in islice(expired, _MAX_DROPPED):
            try:
                check_unused(file)
                self.delete(file)
            except ServerError:
                continue
            except OSError:
                logger.exception("the expired file %s cannot be deleted", file.id)

    def delete(self, file: FileObject) -> None:
        """Delete a file.

        Raises:
            OSError: It cannot be deleted.
        """
        self.path(file.id).unlink(missing_ok=True)
        self.records.delete(file)
        self.num_bytes -= file.bytes

    def page(self, owner: bytes, page: Page, purpose: str | None) -> dict[str, object]:
        """Return a page of the files of an API key; ``purpose`` None shows all."""
        return self.records.page(
            owner, page, lambda file: purpose is None or file.purpose == purpose
        )


def _copy(content: BinaryIO, path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(content, file)

"""Responses of a batch, a JSON object per line, which also record what is done.

Invariants:

1. Each line is written by one call, at the end of the file; a process that is killed leaves at most
   a last line without its newline, which is cut off when the file is opened again.
2. A line of the input has at most one line here: by its ``custom_id``, or where that is missing or
   was on an earlier line by its number, which is in ``id``.
3. At most one process at a time writes the file.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from pagedserve.errors import ConfigError, reason
from pagedserve.server.batches.input_file import BatchLine
from pagedserve.server.batches.requests import BatchRequest, LineError
from pagedserve.server.files.lock import lock_file

if TYPE_CHECKING:  # it imports FastAPI, and files are refused earlier
    from pagedserve.server.http.errors import ServerError

_START: Final = b'{"id": "batch_req_'
# How each line begins: the number of the input's line, custom_id, and the HTTP status.
_LINE: Final = re.compile(
    re.escape(_START) + rb'(\d+)", "custom_id": (null|"(?:[^"\\]|\\.)*"), '
    rb'"response": (?:null|\{"status_code": (\d+), )'
)
_SUCCESS: Final = 200


@dataclass(slots=True)
class OutputFile:
    """An open file of responses.

    Attributes:
        file: The file, for reading and appending.
        custom_ids: Ids of the lines that it has.
        line_numbers: Numbers of the input's lines that it reports without an id.
        num_lines: Number of its lines.
        num_errors: Number of its lines that are errors.
        was_torn: Whether an incomplete last line was cut off.
    """

    file: BinaryIO
    custom_ids: set[str] = field(default_factory=set)
    line_numbers: set[int] = field(default_factory=set)
    num_lines: int = 0
    num_errors: int = 0
    was_torn: bool = False

    def add_response(self, request: BatchRequest, request_id: str, body: bytes) -> None:
        """Write the response to a request.

        Args:
            request: Request of the input.
            request_id: Id of the request in the server.
            body: JSON body of the response.

        Raises:
            OSError: It cannot be written.
        """
        self._add(request.line, request.custom_id, _response(_SUCCESS, request_id, body), None)

    def add_refusal(
        self, request: BatchRequest, request_id: str, error: "ServerError", body: bytes
    ) -> None:
        """Write the error of a request, and the body of its response as in ``add_response``.

        Raises:
            OSError: It cannot be written.
        """
        told = {"code": error.kind, "message": error.message}
        response = _response(error.status, request_id, body)
        self._add(request.line, request.custom_id, response, told)

    def add_error(self, line: BatchLine, error: LineError) -> None:
        """Write that a line is no request.

        Raises:
            OSError: It cannot be written.
        """
        told = {"code": error.code, "message": str(error)}
        self._add(line, error.custom_id, b"null", told)

    def _add(
        self, line: BatchLine, custom_id: str | None, response: bytes, error: object | None
    ) -> None:
        shown = (json.dumps(custom_id).encode(), response, json.dumps(error).encode())
        text = b'%s%d", "custom_id": %s, "response": %s, "error": %s}\n'
        left = memoryview(text % (_START, line.number, *shown))
        try:
            while left:  # more than once only where the disk is full, which raises then
                left = left[self.file.write(left) :]
        except OSError as failure:
            raise OSError(failure.errno, failure.strerror, self.file.name) from failure
        self._count(custom_id, line.number, is_error=error is not None)

    def has(self, line: BatchLine, custom_id: str | None) -> bool:
        """Whether it has a line of the input, by its id, or without one by its number."""
        if custom_id is None:
            return line.number in self.line_numbers
        return custom_id in self.custom_ids

    def read(self) -> None:
        """Find what earlier runs have written, and cut off an incomplete last line.

        Raises:
            OSError: It cannot be read or cut.
            ConfigError: A line is not one that a run writes.
        """
        end = 0
        with os.fdopen(os.dup(self.file.fileno()), "rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    self._cut(line, end)
                    return
                end += len(line)
                self._note(line)

    def _cut(self, line: bytes, end: int) -> None:
        """Cut off an incomplete last line, which begins at byte ``end``."""
        self._check(line.startswith(_START) or _START.startswith(line))
        os.ftruncate(self.file.fileno(), end)
        self.was_torn = True

    def _note(self, line: bytes) -> None:
        found = _LINE.match(line)
        self._check(found is not None and line.endswith(b"}\n"))
        assert found is not None  # noqa: S101  # as checked
        number, custom_id, status = found.groups()
        is_error = status is None or int(status) != _SUCCESS
        self._count(json.loads(custom_id), int(number), is_error=is_error)

    def _check(self, is_ours: bool) -> None:
        if not is_ours:
            raise ConfigError(
                f"output_file: line {self.num_lines + 1} of {self.file.name} is none that "
                "run-batch writes; give a new file, or the one of a run to resume"
            )

    def _count(self, custom_id: str | None, number: int, *, is_error: bool) -> None:
        if custom_id is None:
            self.line_numbers.add(number)
        else:
            self.custom_ids.add(custom_id)
        self.num_lines += 1
        self.num_errors += is_error


def divide(responses: Path, output: Path, errors: Path) -> tuple[int, int]:
    """Divide a file of responses into one of successes and one of errors, which may be empty.

    An incomplete last line is left out.

    Returns:
        Numbers of successes and of errors.

    Raises:
        OSError: One cannot be read or written; then both are deleted.
    """
    num_good = num_lines = 0
    try:
        with responses.open("rb") as lines, output.open("wb") as good, errors.open("wb") as bad:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                found = _LINE.match(line)
                status = None if found is None else found[3]
                is_success = status is not None and int(status) == _SUCCESS
                (good if is_success else bad).write(line)
                num_good, num_lines = num_good + is_success, num_lines + 1
    except OSError:
        output.unlink(missing_ok=True)
        errors.unlink(missing_ok=True)
        raise
    return num_good, num_lines - num_good


def _response(status: int, request_id: str, body: bytes) -> bytes:
    head = b'{"status_code": %d, "request_id": "%s", "body": '
    return head % (status, request_id.encode()) + body + b"}"


@contextmanager
def output_file(path: str, source: BinaryIO) -> Iterator[OutputFile]:
    """Open a file of responses, or create it, and read what earlier runs have written.

    Args:
        path: Path of the file.
        source: The open input, which must be another file.

    Raises:
        ConfigError: It cannot be written, is no regular file, is the input, is written by another
            process, or has lines of others.
    """
    try:
        file = Path(path).open("ab+", buffering=0)  # noqa: SIM115  # closed below
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    with file:
        output = OutputFile(file)
        _check_file(path, file, source)
        try:
            file.seek(0)
            output.read()
        except OSError as error:
            raise _unwritable(path, error) from error
        yield output


def _unwritable(path: str, error: Exception) -> ConfigError:
    return ConfigError(f"output_file: cannot write {path}: {reason(error)}")


def _check_file(path: str, file: BinaryIO, source: BinaryIO) -> None:
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"output_file: {path} is no regular file, so a run could not be resumed")
    if os.path.samestat(found, os.fstat(source.fileno())):
        raise ConfigError(f"output_file: {path} is the input file; give another")
    lock_file(file, f"output_file: another process writes {path}")
